"""Circuits with noise: exact density matrices, and quantum trajectories.

    density         DensityState: a density matrix sharded over ranks, and what is read off it
    density_gradients   outputs and gradients of layers whose circuits have channels
    doubled         the circuit that acts on the density matrix as a vector: U on rows, conj(U) on columns
    trajectories    expectation values as means over sampled trajectories
    readout         bits that are read wrongly
    model           channels added after the gates of a circuit

The channels are in circuit/channels.py; the walk of many trajectories, which measured bits take too, is in shots.py.
"""
