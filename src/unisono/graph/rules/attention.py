"""Attention: samples and heads are independent; queries are, where keys and values are replicated."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall
from unisono.graph.rules.elementwise import aligned
from unisono.graph.rules.option import REPLICATE, SUM, Option
from unisono.graph.rules.registry import rule
from unisono.mesh.placement import Placement


@rule("aten.scaled_dot_product_attention")
def attention(call: OpCall) -> Iterator[Option]:
    """Causal attention of some queries needs to know which they are, and dropout which part of the weights it sees."""
    queries = call.shape("query")
    weights = (*queries[:-1], call.shape("key")[-2])
    drops = call["dropout_p"] > 0
    if drops:
        yield call.option(REPLICATE, "attention")
    for dim in range(len(queries) - 2):
        shard = Shard(dim)
        if call.shape("key")[dim] > 1 and call.shape("value")[dim] > 1:
            yield _option(
                call, weights, dim, shard, query=shard, key=shard, value=shard, local="attention" if drops else None
            )
    row = len(queries) - 2
    is_local = drops or call["is_causal"]
    yield _option(call, weights, row, Shard(row), query=Shard(row), local="attention" if is_local else None)
    last = Shard(len(queries) - 1)
    yield call.option(last, "attention" if drops else None, value=last)
    yield call.option(SUM, "attention" if drops else None, value=SUM)


def _option(
    call: OpCall, weights: tuple[int, ...], dim: int, made: Placement, local: str | None, **given: Placement
) -> Option:
    mask = aligned(call.shape("attn_mask"), weights, dim) if "attn_mask" in call.names else REPLICATE
    return call.option(made, local, **given, attn_mask=mask)
