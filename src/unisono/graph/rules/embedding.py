"""Lookups: by row of a table, or element by element along a dim."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import SUM, Option
from unisono.graph.rules.registry import rule


@rule("aten.embedding")
def embedding(call: OpCall) -> Iterator[Option]:
    """A rank with some rows of the table finds zeros for the others, so that the ranks' findings add up. Gradients that
    are scaled by how often a row is looked up need all indices, and the rows' own numbers."""
    by_rows = not call["scale_grad_by_freq"]
    for dim in range(len(call.shape("indices")) if by_rows else 0):
        yield call.option(Shard(dim), indices=Shard(dim))
    yield call.option(Shard(len(call.result) - 1), weight=Shard(1))
    if by_rows:
        yield call.option(SUM, "embedding", weight=Shard(0))
    yield call.option(SUM, weight=SUM)
