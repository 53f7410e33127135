"""From operations on one rank's amplitudes to a program of instructions for the CPU and GPU kernels.

Read in this order:

    lowering    gates as rotations, phases, flips and dense matrices
    frame       bits of a tile as parities of its rows: CNOT, X and SWAP cost nothing
    stages      the primitives of a tile in few passes
    linear_sweeps   for a GPU: sweeps over linear subspaces, where CNOT and X cost nothing between tiles either
    angles      the angles of a program, evaluated and differentiated together
    assembly    tiles as arrays of instructions (kernels/code.py)
    packed      a program compressed between its runs
    bound       a program in a workspace, with its angles: what the CPU kernels run
    compiled    the full pipeline for one list of operations

Called by kernels/runner.py and kernels/gpu.py.
"""
