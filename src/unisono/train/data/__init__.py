"""Data: loader (Loader: batches, position, state), sample_order (which sample has which position in an epoch), reading
(samples, collation, random numbers of a sample), sampler (DistributedBatchSampler), partitioner (fixed parts of a
dataset). Called by Engine and by scripts."""
