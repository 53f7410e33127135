"""The distributed program of a model: local ops, explicit collectives, one train step.

lowering          a trace and an assignment as instructions of a rank, as data
redistribute      a tensor on its way between two placements
program           the entry: DistributedProgram, what `uni.to_static` returns
executable        one traced graph, ready to run on this rank
binding, codegen  functions for instructions, and the Python function made of them
rewrites          local ops that are not simply the op itself (sharded_loss, local_op)
shards            the parameters and buffers that a rank holds, to full and back
zero              ZeRO in a program
gradient_sums     sums of gradients during the backward
batch             which graph runs for a batch
"""
