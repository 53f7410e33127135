"""ZeRO: optimizer state (1), gradients (2) and parameters (3) sharded over the data ranks.

zero           stages 1 and 2: ShardedOptimizer
fully_sharded  stage 3: FullyShardedOptimizer; zero_optimizer chooses
units          of stage 3: parts of a model whose parameters are gathered while they run
shards         which shard of a parameter a rank owns, and buckets of them
"""
