"""Random numbers by the element's index in the full tensor, the same under every plan.

Read in this order:

state             RandomState: what makes numbers independent of the plan; scopes set which part a rank holds
draw              one call for random numbers: words, uniform, normal, keep
philox            the counter-based generator; philox_cpu (numba) and philox_gpu (triton) give the same bits
step_keys         the streams of a step in a table on the GPU, for steps that are a CUDA graph
active            the RandomState that a thread draws from
dropout           F.dropout, its variants and attention's dropout_p
random_functions  torch.rand, torch.randn and the functions computed from them
random_ops        random ops in torch's dispatcher: methods of tensors, and the refusal of all others
"""
