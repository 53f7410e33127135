"""A training job as the cost model sees it. Read in this order:

model_profile  ModelProfile, its segments, ops and weights; Setting: how a plan divides them
from_trace     the profile of a traced model
backward       gradients of activations that are alive, op by op (used by from_trace)
selective      the policy of recompute=selective: what is dropped, and kept instead
stages         the segments that each rank of a pipeline holds
"""
