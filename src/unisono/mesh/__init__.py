"""Where tensors are: a mesh of ranks, placements on it, redistribution, and values that depend on neither.

mesh            ranks in a grid with named axes, and their communicators
placement       torch's Shard, Replicate and Partial on a mesh: local shapes and slices
route, reshard  the cheapest sequence of collectives between two placements, and its execution
autograd_collectives  collectives that gradients flow back through
collective_ops  collectives in compiled graphs
sharded_cross_entropy  cross entropy of logits whose classes are sharded
sharded_batch_norm     batch norm over the samples of all ranks
bucket          gradients that are summed in one message
gradient_norm   the norm of gradients that ranks hold shards of, and scaling by it
global_index    which elements of a full tensor a rank holds, by number
random/         random numbers by global index: dropout and torch's random functions, independent of the plan
deferred_init/  models built on the meta device, materialized tensor by tensor
named_groups    parameter groups by name, the same under every plan
optimizers      how much of a parameter an optimizer must see; fused steps
side_effects    trial runs that leave the user's objects as they were
interception    blocks in which every operation passes through one method
"""
