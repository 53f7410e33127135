"""Normalisations and softmaxes: sharded along the dims that they do not mix."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import Option
from unisono.graph.rules.registry import rule


@rule("aten.layer_norm", "aten.rms_norm")
def layer_norm(call: OpCall) -> Iterator[Option]:
    mixed = len(call["normalized_shape"])
    for dim in range(len(call.result) - mixed):
        yield call.option(Shard(dim), input=Shard(dim))


@rule("aten.softmax.int", "aten.log_softmax.int", "aten._softmax", "aten._log_softmax")
def softmax(call: OpCall) -> Iterator[Option]:
    mixed = call.dim("dim")
    for dim in range(len(call.result)):
        if dim != mixed:
            yield call.option(Shard(dim), self=Shard(dim))


@rule("aten.group_norm")
def group_norm(call: OpCall) -> Iterator[Option]:
    yield call.option(Shard(0), input=Shard(0))


@rule("aten.instance_norm")
def instance_norm(call: OpCall) -> Iterator[Option]:
    """Running statistics average over samples: then channels only."""
    affine = {name: Shard(0) for name in call.names if name != "input"}
    yield call.option(Shard(1), input=Shard(1), **affine)
    if "running_mean" not in call.names:
        yield call.option(Shard(0), input=Shard(0))


@rule("aten.batch_norm")
def batch_norm(call: OpCall) -> Iterator[Option]:
    """Channels are apart; samples are in training only where the ranks average them together."""
    affine = {name: Shard(0) for name in call.names if name != "input"}
    yield call.option(Shard(1), input=Shard(1), **affine)
    mixed = bool(call["training"])
    for dim in (0, *range(2, len(call.result))):
        yield call.option(Shard(dim), "batch_norm" if mixed else None, input=Shard(dim))
