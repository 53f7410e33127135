"""Batch normalisation of which each rank has some samples: the ranks average over all of them, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.mesh.autograd_collectives import first_order_only

# Of the wide input: of each channel (dim 1) the mean and the sum of squared deviations, and the count, over all ranks.
Statistics = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Reduce = Callable[[torch.Tensor, str], torch.Tensor]  # over the ranks that have the other samples; without a gradient


def normalised(
    input: torch.Tensor, eps: float, statistics: Statistics, reduce: Reduce
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input without its mean, over its deviation, at least in float32; and the statistics."""
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    found = _Normalise.apply(input, eps, statistics, reduce)
    return found


def scaled(normal: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is not None:
        normal = normal * of_channels(weight.to(normal.dtype), normal)
    if bias is not None:
        normal = normal + of_channels(bias.to(normal.dtype), normal)
    return normal


def sum_over_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Of each channel."""
    return tensor.sum([dim for dim in range(tensor.ndim) if dim != 1])


def of_channels(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A number of each channel, in a shape that broadcasts."""
    return channels.view(1, -1, *[1] * (like.ndim - 2))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, eps: float, statistics: Statistics, reduce: Reduce
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = input.double() if input.dtype == torch.float64 else input.float()
        mean, deviations, count = statistics(wide)
        scale = torch.rsqrt(deviations / count + eps)
        normal = (wide - of_channels(mean, wide)) * of_channels(scale, wide)
        ctx.save_for_backward(normal, scale, count)
        ctx.reduce = reduce
        ctx.mark_non_differentiable(mean, deviations, count)
        ctx.dtype = input.dtype
        return normal, mean, deviations, count

    @staticmethod
    @first_order_only("BatchNorm over the global batch", "use a plan without dp and microbatches, or another norm")
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        normal, scale, count = ctx.saved_tensors
        sums = torch.stack([sum_over_batch(gradient), sum_over_batch(gradient * normal)])
        straight, along = ctx.reduce(sums, "sum") / count
        slope = gradient - of_channels(straight, normal) - normal * of_channels(along, normal)
        return (slope * of_channels(scale, normal)).to(ctx.dtype), None, None, None
