"""torch.compile of a model's parts, under every strategy.

    regions.py     which modules are compiled, one by one; the first step and whatever cannot be compiled run eagerly
    rewrite.py     Dynamo's graph of a region, rewritten before it is compiled: calls that unisono handles become ops
    eager_op.py    an op that runs a Python function eagerly within a compiled graph, with its gradient
    collectives.py collectives of tensor parallelism as ops and autograd functions that can be traced

Called by `parallel.compose`, as a step of a plan with `compile`.
"""
