"""Batch normalisation of which each rank has some samples: the ranks average over all of them, both ways."""

from __future__ import annotations

from typing import Any

import torch

from unisono.graph.program.local_op import LocalOp


def batch_norm(
    local_op: LocalOp,
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
    number = local_op.number("input")
    full = local_op.call.shape("input")
    axes = local_op.axes_sharding(number, *(dim for dim in range(len(full)) if dim != 1))
    normal = _SharedNormal.apply(x, torch.Size(full).numel() // full[1], eps, local_op, axes)
    shape = [1, -1] + [1] * (x.dim() - 2)
    if weight is not None:
        normal = normal * weight.view(shape)
    return normal if bias is None else normal + bias.view(shape)


class _SharedNormal(torch.autograd.Function):
    """x without its mean, over its deviation, a channel (dim 1) at a time."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, count: int, eps: float, local_op: LocalOp, axes: tuple[int, ...]
    ) -> torch.Tensor:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        centred = x - local_op.reduce(x.sum(dims, keepdim=True), "sum", axes) / count
        scale = (local_op.reduce(centred.square().sum(dims, keepdim=True), "sum", axes) / count + eps).rsqrt()
        normal = centred * scale
        ctx.save_for_backward(normal, scale)
        ctx.rest = count, dims, local_op, axes
        return normal

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        normal, scale = ctx.saved_tensors
        count, dims, local_op, axes = ctx.rest
        sums = torch.stack([grad.sum(dims, keepdim=True), (grad * normal).sum(dims, keepdim=True)])
        mean, slope = (local_op.reduce(sums, "sum", axes) / count).unbind()
        return scale * (grad - mean - normal * slope), None, None, None, None
