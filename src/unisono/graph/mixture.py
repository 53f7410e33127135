"""A mixture of experts as one op of a graph: which experts a token visits depends on its values, but what comes of each
token is a token again. It is there to be looked at, with the sizes of tokens that visit all experts alike, and not to
be run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from unisono.errors import UsageError
from unisono.graph.rules.call import Call

EXPERTS = ("up", "down", "up_bias", "down_bias", "gate")  # the arguments that have a row for each expert


@torch.library.custom_op("unisono::moe", mutates_args=())
def _moe(
    x: torch.Tensor,
    router: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    *,
    top_k: int,
    capacity_factor: float | None = None,
    aux_weight: float = 0.0,
) -> torch.Tensor:
    """tokens (..., width), router (experts, width), up and gate (experts, hidden, width), down (experts, width, hidden)
    -> (..., width)"""
    raise UsageError("unisono::moe stands for a uni.nn.MoE in a graph that is shown; run the module itself")


@_moe.register_fake
def _(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(x)


MIXTURE = torch.ops.unisono.moe.default


def is_mixture(node: fx.Node) -> bool:
    return node.target is MIXTURE


def mixture_flops(call: Call) -> int:
    """Of the router, and of two products, or three, for each visit."""
    tokens, (experts, hidden, width) = math.prod(call.shape("x")[:-1]), call.shape("up")
    products = 3 if "gate" in call.names else 2
    return 2 * tokens * width * (experts + call["top_k"] * products * hidden)


class _Kept(torch.autograd.Function):
    """Keeps what a mixture keeps for its backward: of each visit its row, what its expert had in between, and what came
    of it."""

    @staticmethod
    def forward(ctx: Any, top_k: int, is_gated: bool, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        router, up = parameters[:2]
        visits, hidden = top_k * math.prod(x.shape[:-1]), up.shape[1]
        between = [x.new_empty(visits, hidden) for _ in range(4 if is_gated else 2)]
        rows = [x.new_empty(visits, x.shape[-1]) for _ in range(2)]
        probabilities = x.new_empty(*x.shape[:-1], len(router))
        ctx.save_for_backward(x, *parameters, probabilities, *rows, *between)
        return torch.empty_like(x)


def weighed_mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    *,
    top_k: int,
    **_: Any,
) -> torch.Tensor:
    """The op on tensors without data, for autograd to tell what it keeps."""
    more = [each for each in (up_bias, down_bias, gate) if each is not None]
    return _Kept.apply(top_k, gate is not None, x, router, up, down, *more)
