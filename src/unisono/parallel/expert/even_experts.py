"""Experts that are all visited alike: a mixture of experts in a form that can be traced.

Which experts a token visits depends on its values, so a MoE cannot be traced. For the planner, which needs its
cost, tokens may as well be distributed round-robin: the same products of the same sizes, on average.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from unisono.parallel.expert.expert import MoE


@contextlib.contextmanager
def evenly_visited(model: nn.Module) -> Iterator[None]:
    """In the block, every MoE of the model distributes its tokens round-robin."""
    changed = [module for module in model.modules() if isinstance(module, MoE)]
    for module in changed:
        module.forward = partial(_forward, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _forward(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    tokens = x.reshape(-1, moe.width)
    weight, _ = torch.softmax(moe.router(tokens), -1).topk(moe.top_k, -1)
    if moe.renormalise:
        weight = weight / weight.sum(-1, keepdim=True)
    visits = len(tokens) * moe.top_k
    token = torch.arange(visits, device=x.device) // moe.top_k
    each, more = divmod(visits, moe.experts)
    outcomes = moe.run_experts(tokens[token], [each + (number < more) for number in range(moe.experts)])
    weighted = outcomes * weight.reshape(-1, 1).to(outcomes.dtype)
    return torch.zeros_like(tokens, dtype=weighted.dtype).index_add(0, token, weighted).view(x.shape)
