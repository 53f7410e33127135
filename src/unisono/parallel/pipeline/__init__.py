"""Pipeline parallelism: the layers of a model on several ranks, microbatches passing through them.

split            a model into stages (layers: a model given as a list of layers)
stage            some consecutive blocks, run by the model's own forward
runtime          a rank carries out its list of actions (plan/schedules)
message, transfers   what stages send each other
backward         the backward of a microbatch at a stage, full or in halves
tied             parameters that several stages hold
skips, dependence    tensors that a model carries round its blocks
parameter_usage, off_stage   which parameters a stage uses, and those it does not hold
rehearsal        all stages on one rank, without memory, before ranks communicate
generation       greedy generation through a pipeline
traced           a graph in stages, for to_static
"""
