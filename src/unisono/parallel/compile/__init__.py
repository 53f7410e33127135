"""torch.compile of a model's parts, under every strategy.

    regions.py     which modules are compiled, one by one; the first step and whatever cannot be compiled run eagerly
    rewrite.py     Dynamo's graph of a region, rewritten before it is compiled: calls that unisono handles become ops
    backends.py    inductor, or AOTAutograd alone; what they must not compute again
    eager_op.py    an op that runs a Python function eagerly within a compiled graph, with its gradient
    collectives.py tensor parallelism in a graph: markers that Dynamo records, and the collectives that they become
    loss.py        the loss, also where its means are over the global batch
    cuda_graph.py  a training step on one GPU, captured once and replayed

Called by `parallel.compose`, as a step of a plan with `compile`.
"""
