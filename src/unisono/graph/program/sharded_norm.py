"""Batch normalisation of which each rank has some samples: the ranks average over all of them, both ways."""

from __future__ import annotations

from typing import Any

import torch

from unisono.graph.program.local_op import Place


def batch_norm(
    place: Place,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: None,
    running_var: None,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> torch.Tensor:
    """In training; running statistics are ops of their own in the graph."""
    number = place.number("input")
    whole = place.call.shape("input")
    axes = place.axes_cutting(number, *(dim for dim in range(len(whole)) if dim != 1))
    normal = _SharedNormal.apply(x, torch.Size(whole).numel() // whole[1], eps, place, axes)
    shape = [1, -1] + [1] * (x.dim() - 2)
    if weight is not None:
        normal = normal * weight.view(shape)
    return normal if bias is None else normal + bias.view(shape)


class _SharedNormal(torch.autograd.Function):
    """x without its mean, over its deviation, a channel (dim 1) at a time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, eps: float, place: Place, axes: tuple[int, ...]) -> torch.Tensor:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        centred = x - place.talk(x.sum(dims, keepdim=True), "sum", axes) / count
        scale = (place.talk(centred.square().sum(dims, keepdim=True), "sum", axes) / count + eps).rsqrt()
        normal = centred * scale
        ctx.save_for_backward(normal, scale)
        ctx.rest = count, dims, place, axes
        return normal

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        normal, scale = ctx.saved_tensors
        count, dims, place, axes = ctx.rest
        sums = torch.stack([grad.sum(dims, keepdim=True), (grad * normal).sum(dims, keepdim=True)])
        mean, slope = (place.talk(sums, "sum", axes) / count).unbind()
        return scale * (grad - mean - normal * slope), None, None, None, None
