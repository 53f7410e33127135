"""Expert parallelism: the experts of a mixture are shared by the ranks of "ep".

expert        MoE, and its experts sharded over ranks
grouped       the products of all experts at once, which wait for no counts
all_to_all    tokens to their experts and back, with gradients
even_experts  a mixture whose experts are all visited alike, for traces
"""
