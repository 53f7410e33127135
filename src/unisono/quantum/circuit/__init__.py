"""Circuits: what a user writes down, independent of ranks and kernels.

Read in this order:

    parameter      angles: numbers, weights, features, and affine expressions of them
    gates          matrices, derivatives and inverses of the gates
    channels       noise: Kraus channels and the circuit's methods for them
    operation      a gate on targets, under controls, with angles
    circuit        the circuit; its gate methods are in gate_methods
    deferred       circuits that measure in the middle, as unitary circuits on more wires
    templates      common ansatz circuits
    commutation    which operations commute, for the scheduler
    drawing        circuits as text and as SVG; drawing_mpl has them as figures of matplotlib
    operations     the immutable sequence of operations that circuit, schedule and program share
    growable       a list and an array that leave no freed blocks on the heap

Everything else in unisono.quantum builds on this folder.
"""
