"""Sequence and context parallelism: ranks share the tokens of each sequence.

sequence           between tensor-parallel regions activations are sharded along the sequence
context            context parallelism: all of the model runs on some of the tokens
tokens             which positions each rank holds
sharded_attention  scaled_dot_product_attention over the tokens of all ranks
ring_attention, ulysses   its two algorithms (partial_attention: attention to some of the keys)
views              views that count on the full sequence
"""
