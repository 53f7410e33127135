"""What cannot be right under a plan, found and refused before ranks communicate.

samples          where samples are, and whether the model keeps them apart (sample_comparison)
tokenwise        whether the model works token by token, for sp and cp
preview          whether the loss takes what the model returns
separable        torch's layers that depend on the shards of a batch
parameter_reads  parameters that are read beyond their module
rounded_weights  weights that are half under ZeRO, used as float32
updated_buffers  buffers that the forward updates; batch_statistics: BatchNorm on a part of the batch
optimizer_scope, parameter_groups   optimizers that would have to see more than a rank holds
value_reads      calls by which Python sees values
"""
