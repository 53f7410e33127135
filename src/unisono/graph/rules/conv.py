"""Convolutions and pooling: samples and channels are independent; input channels are summed over. Positions are not
sharded, as neighbours would have to exchange their edges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import SUM, Option
from unisono.graph.rules.registry import rule


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")
def convolution(call: OpCall) -> Iterator[Option]:
    given = "input"
    spatial = len(call.shape("weight")) - 2
    batched = len(call.shape(given)) == spatial + 2
    channels = int(batched)
    bias = "bias" in call.names
    if batched:
        yield call.option(Shard(0), input=Shard(0))
    if call["groups"] != 1 or call.arguments.get("transposed"):
        return
    yield call.option(Shard(channels), weight=Shard(0), **({"bias": Shard(0)} if bias else {}))
    yield call.option(SUM, input=Shard(channels), weight=Shard(1), **({"bias": SUM} if bias else {}))
    yield call.option(SUM, weight=SUM, **({"bias": SUM} if bias else {}))
    yield call.option(SUM, input=SUM, **({"bias": SUM} if bias else {}))


@rule(
    "aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d", "aten.max_pool2d_with_indices", "aten.avg_pool1d",
    "aten.avg_pool2d", "aten.avg_pool3d", "aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d",
    "aten.adaptive_avg_pool3d", "aten.adaptive_max_pool2d", "aten.upsample_nearest2d", "aten.upsample_bilinear2d",
)  # fmt: skip
def pooling(call: OpCall) -> Iterator[Option]:
    spatial = {"1": 1, "2": 2, "3": 3}.get(_digit(str(call.node.target)), 2)
    for dim in range(len(call.result) - spatial):
        yield Option((Shard(dim),), (Shard(dim),) * len(call.results))


def _digit(name: str) -> str:
    """The digit before the d of pool2d."""
    return next((char for char, after in itertools.pairwise(name) if char in "123" and after == "d"), "")


@rule("aten.pixel_shuffle", "aten.pixel_unshuffle")
def shuffle(call: OpCall) -> Iterator[Option]:
    for dim in range(len(call.result) - 3):
        yield Option((Shard(dim),), (Shard(dim),))
