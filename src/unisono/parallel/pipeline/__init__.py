"""Pipeline parallelism: the layers of a model on several ranks, microbatches passing through them."""
