"""ZeRO: optimizer state (1), gradients (2) and parameters (3) sharded over the data ranks.

zero    the stages
shards  which rows of a parameter a rank owns, and buckets of them
units   stage 3: parts of a model whose parameters are gathered while they run
"""
