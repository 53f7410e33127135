"""What a step under a plan costs. Read in this order:

op_time     one op on one machine: roofline, overheads; StageCost: sums of ops
collective  alpha-beta times of collectives
memory      MemoryModel: bytes on the rank that needs most
replicas    gradients and parameters between data-parallel ranks: ZeRO's messages and copies
time        TimeModel: seconds of a step
"""
