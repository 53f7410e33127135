"""Data: loader (Loader: batches, position, state), reading (samples, collation, random numbers of a sample), sampler
(order of samples, DistributedBatchSampler), partitioner (fixed parts of a dataset). Called by Engine and by scripts."""
