"""Losses of which each rank has some samples, or some classes.

With some samples a rank gives its share of the loss of all: its sum over the count (or weight) of the full batch,
which the ranks add up first. With some classes the loss is that of mesh/sharded_cross_entropy.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from unisono.graph.program.local_op import LocalOp
from unisono.mesh.sharded_cross_entropy import sharded_cross_entropy

NONE, MEAN, TOTAL = 0, 1, 2  # torch's numbers for reduction=


def cross_entropy(
    local_op: LocalOp,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    classes = min(logits.dim() - 1, 1)
    splitting = local_op.axes_sharding(local_op.number("self"), classes)
    soft = target.dim() == logits.dim()
    if splitting:
        loss = _of_some_classes(local_op, logits, target, classes, splitting, ignore_index, label_smoothing)
        total = loss.sum() if reduction != NONE else loss
    else:
        how = "none" if reduction == NONE else "sum"
        ignored = -100 if soft else ignore_index
        total = F.cross_entropy(
            logits, target, weight, reduction=how, ignore_index=ignored, label_smoothing=label_smoothing
        )
    if reduction != MEAN:
        return total
    if soft:
        full = local_op.call.shape("self")
        return total / (torch.Size(full).numel() // full[classes])
    return total / _weight_of_all(local_op, target, weight, ignore_index)


def nll_loss(
    local_op: LocalOp,
    logs: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    total = F.nll_loss(logs, target, weight, reduction="sum", ignore_index=ignore_index)
    return total / _weight_of_all(local_op, target, weight, ignore_index)


def mean_loss(local_op: LocalOp, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As the op gives it for this rank's elements, weighed by their share of all."""
    mine, full = local_op.box()[0], local_op.call.shape()
    return local_op.node.target(*args, **kwargs) * (torch.Size(mine).numel() / torch.Size(full).numel())  # type: ignore[operator]


def _weight_of_all(
    local_op: LocalOp, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """How many targets count in the full batch, or how much they weigh."""
    counted = target != ignore_index
    number = local_op.number("target")
    axes = local_op.axes_sharding(number, *range(target.dim()))
    if weight is None:
        mine = counted.sum().to(torch.float64 if not target.is_cuda else torch.float32)
    else:
        mine = torch.where(counted, weight[torch.where(counted, target, 0)], 0.0).sum()
    return local_op.reduce(mine, "sum", axes).to(_result_dtype(local_op))


def _result_dtype(local_op: LocalOp) -> torch.dtype:
    return local_op.call.results[0].dtype


def _of_some_classes(
    local_op: LocalOp,
    logits: torch.Tensor,
    target: torch.Tensor,
    classes: int,
    axes: tuple[int, ...],
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """The loss of each target, 0 where it is ignored."""
    first = local_op.box(local_op.number("self"))[1][classes]
    count = local_op.call.shape("self")[classes]

    def reduce(tensor: torch.Tensor, op: str) -> torch.Tensor:
        return local_op.reduce(tensor, op, axes)

    return sharded_cross_entropy(logits.movedim(classes, -1), target, reduce, first, count, ignore_index, smoothing)
