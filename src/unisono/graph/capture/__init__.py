"""A model and its loss as one graph of ops on full tensors, without running it on data.

trace            the entry: a Trace of a model for an example batch
step             what is exported: the model with its loss, as one module
export           torch.export, and why it cannot be done in the user's words
functionalize    passes that bring the graph into the form that rules expect
unfuse           fused projections taken apart; attention_heads: heads apart from samples
op_costs         FLOPs, bytes and saved activations of each op (op)
channel_dropout  dropout of channels as products with plain dropout
attributes, module_state, rng_use, unsupported   what a graph would lose, found and refused
source           the line of the user's code that an op comes from
"""
