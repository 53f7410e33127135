"""Tensor parallelism: every layer is shared by the ranks of "tp", all of which see the same samples.

tensor_parallel  the entry: applies rules (parallel/rules) to a model; rule_checks: what it refuses
linear, convolution, attention, vocabulary   the layers
deferred         a linear layer whose weight gradient can wait
logits           logits that stay sharded until the loss
region           the part of a model in which ranks have different features
custom_layers, user_hooks   subclasses with a forward of their own, and hooks
adapters         layers with adapters of peft (LoRA)
parameter_shards   which shard of each parameter a rank keeps
coverage         how much of a model is sharded
head_width       models that count heads themselves
"""
