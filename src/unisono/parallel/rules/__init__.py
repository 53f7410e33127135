"""Which layers tensor parallelism shards, and how.

rules      styles by module name; sharded_dims: which dim of each parameter they shard
published  plans that a model brings (Hugging Face)
derived    from the blocks' layers
inferred   from the data flow (dataflow)
searched   from the graph
trial      a sharded module on simulated ranks must compute what it computes on one device
"""
