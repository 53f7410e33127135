"""Ops that make tensors: each rank makes its shard, with the numbers that the full tensor has there."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import REPLICATE, SUM, Option
from unisono.graph.rules.registry import rule, target_name


@rule("aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.arange", "aten.scalar_tensor", "aten.empty_permuted")
def factory(call: OpCall) -> Iterator[Option]:
    for dim in range(len(call.result)):
        yield Option((), (Shard(dim),), "factory")


@rule("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")
def factory_by_example(call: OpCall) -> Iterator[Option]:
    """Only dtype and device of the given tensor count, so it may have any placement."""
    anyhow = [REPLICATE, *map(Shard, range(len(call.shape())))]
    for given in anyhow:
        yield Option((given,), (REPLICATE,))
        for dim in range(len(call.result)):
            yield Option((given,), (Shard(dim),), "factory")


@rule("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like")
def like(call: OpCall) -> Iterator[Option]:
    for dim in range(len(call.result)):
        yield Option((Shard(dim),), (Shard(dim),))


@rule("aten.rand", "aten.randn")
def random_factory(call: OpCall) -> Iterator[Option]:
    """Numbers depend on an element's index in the full tensor, so the ranks' shards fit together."""
    yield Option((), (REPLICATE,), "random")
    for dim in range(len(call.result)):
        yield Option((), (Shard(dim),), "random")


@rule("aten.rand_like", "aten.randn_like")
def random_like(call: OpCall) -> Iterator[Option]:
    yield Option((REPLICATE,), (REPLICATE,), "random")
    for dim in range(len(call.result)):
        yield Option((Shard(dim),), (Shard(dim),), "random")


def draws(node: fx.Node) -> bool:
    """Whether an op takes random numbers."""
    name = target_name(node.target)
    if name.startswith("aten.dropout."):
        return bool(OpCall(node)["train"]) and OpCall(node)["p"] > 0
    if name.startswith("aten.scaled_dot_product_attention."):
        return OpCall(node)["dropout_p"] > 0
    given = OpCall(node).arguments
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return is_random and bool(given.get("train", given.get("training", True))) and given.get("dropout", 1.0) > 0


def is_followed(node: fx.Node) -> bool:
    """Whether an op that draws takes the numbers that it takes on one device, under any placements."""
    return target_name(node.target).rpartition(".")[0] in _FOLLOWED


_FOLLOWED = ("aten.rand", "aten.randn", "aten.rand_like", "aten.randn_like", "aten.dropout",
             "aten.scaled_dot_product_attention")  # fmt: skip


@rule("aten.dropout")
def dropout(call: OpCall) -> Iterator[Option]:
    """Linear once its mask is drawn, and the mask is the same for all parts of a sum."""
    local = "dropout" if draws(call.node) else None
    yield Option((REPLICATE,), (REPLICATE,), local)
    for dim in range(len(call.result)):
        yield Option((Shard(dim),), (Shard(dim),), local)
    yield Option((SUM,), (SUM,), local)
