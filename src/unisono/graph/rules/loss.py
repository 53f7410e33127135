"""Losses: sharded along samples they give a part of the sum; cross entropy can be sharded along classes too."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import REPLICATE, SUM, Option
from unisono.graph.rules.registry import rule

NONE, MEAN, TOTAL = 0, 1, 2  # torch's numbers for reduction=


@rule("aten.cross_entropy_loss")
def cross_entropy(call: OpCall) -> Iterator[Option]:
    """Without a batch dim, classes are dim 0. Targets may be class numbers or, in the input's shape, probabilities."""
    shape, reduction = call.shape("self"), call["reduction"]
    classes = min(len(shape) - 1, 1)
    soft = len(call.shape("target")) == len(shape)
    for dim in range(len(shape)):
        if dim == classes:
            continue
        left = dim - (dim > classes)  # where the dim is once the classes are gone
        made = Shard(left) if reduction == NONE else SUM
        local = "cross_entropy" if reduction == MEAN else None
        yield call.option(made, local, self=Shard(dim), target=Shard(dim if soft else left))
    if not soft and "weight" not in call.names:
        yield call.option(REPLICATE, "cross_entropy", self=Shard(classes))


@rule(
    "aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_with_logits", "aten.kl_div", "aten.soft_margin_loss",
)  # fmt: skip
def pointwise_loss(call: OpCall) -> Iterator[Option]:
    shape, reduction = call.shape(), call["reduction"]
    if any(other != shape for other in call.shapes):
        return
    for dim in range(len(shape)):
        made = Shard(dim) if reduction == NONE else SUM
        yield Option((Shard(dim),) * len(call.tensors), (made,), "mean_loss" if reduction == MEAN else None)


@rule("aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d")
def nll_loss(call: OpCall) -> Iterator[Option]:
    shape, reduction = call.shape(), call["reduction"]
    for dim in range(len(shape)):
        classes = min(len(shape) - 1, 1)
        if dim != classes:
            of_target = dim if dim < classes else dim - 1
            made = Shard(of_target) if reduction == NONE else SUM
            yield call.option(made, "nll_loss" if reduction == MEAN else None, self=Shard(dim), target=Shard(of_target))
