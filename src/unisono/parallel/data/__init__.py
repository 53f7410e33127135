"""Data parallelism: every rank has the full model and a share of the batch.

data_parallel  the algorithm, and its form that overlaps with the backward
reducer        when which bucket is sent; ZeRO uses it too
batchnorm      statistics over the global batch
clip           the norm of gradients of which every rank holds shards
"""
