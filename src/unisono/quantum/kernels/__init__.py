"""Kernels: operations applied to one rank's amplitudes.

Read in this order:

    reference           the readable kernel in torch; the others are tested against it
    runner              the choice of a kernel
    code                the instructions that compile/ writes and the fast kernels read
    cpu, cpu_reverse    the CPU kernel (numba), forward and backward; rotations and vector are its SIMD code
    bind                angles filled into a program
    gpu, tiles.cu       the GPU kernel; gpu_program makes its passes
    pauli_strings       signed sums over amplitudes for Pauli strings, with pauli_strings_cpu, _gpu and .cu
    workspace           working memory and threads of the CPU kernels
    compiling           how numba kernels are compiled and cached on disk

Called by distributed/local_steps.py, compile/bound.py and observables/.
"""
