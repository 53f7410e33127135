"""Batch normalisation of a batch that lies on several ranks: statistics are those of all of it.

Of each channel the ranks add up the sum, and then the squared deviations from the common mean, so that nothing cancels.
The gradient of the normalised x is, with means over the whole batch, (dy - mean(dy) - x mean(dy x)) / deviation: two
sums a channel cross the ranks in the backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from unisono.graph.place import Place


def batch_norm(
    place: Place,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> torch.Tensor:
    """In training. Running statistics are updated in place, as torch's own does."""
    whole = place.call.shape("input")
    mixed = tuple(dim for dim in range(len(whole)) if dim != 1)
    count = math.prod(whole[dim] for dim in mixed)
    axes = place.axes_cutting(place.number("input"), *mixed)
    normal, mean, deviations = _Normalised.apply(x, place, axes, mixed, count, eps)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((deviations / (count - 1)).to(running_var.dtype), momentum)
    shape = (1, -1, *[1] * (len(whole) - 2))
    if weight is not None:
        normal = normal * weight.view(shape)
    return normal if bias is None else normal + bias.view(shape)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, place: Place, axes: tuple[int, ...], mixed: tuple[int, ...], count: int, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = place.talk(x.sum(mixed, keepdim=True), "sum", axes) / count
        centred = x - mean
        deviations = place.talk(centred.square().sum(mixed, keepdim=True), "sum", axes)
        scale = (deviations / count + eps).rsqrt()
        normal = centred * scale
        ctx.save_for_backward(normal, scale)
        ctx.place, ctx.axes, ctx.mixed, ctx.count = place, axes, mixed, count
        statistics = mean.flatten(), deviations.flatten()
        ctx.mark_non_differentiable(*statistics)
        return normal, *statistics

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        gradient = gradients[0]
        normal, scale = ctx.saved_tensors
        sums = torch.stack([gradient.sum(ctx.mixed, keepdim=True), (gradient * normal).sum(ctx.mixed, keepdim=True)])
        first, second = ctx.place.talk(sums, "sum", ctx.axes) / ctx.count
        return (gradient - first - normal * second) * scale, None, None, None, None, None
