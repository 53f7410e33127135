"""Products of rows with the matrix of their expert, rows being sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import SUM, Option
from unisono.graph.rules.registry import rule


@rule("aten._grouped_mm", "transformers.grouped_mm_fallback")
def grouped_mm(call: OpCall) -> Iterator[Option]:
    """rows (n, k), matrices (experts, k, m), ends of the experts' rows (experts,) -> (n, m).

    A rank with some of the experts gives zeros for the rows of others, so that the ranks' results add up.
    """
    rows, matrices = call.names[:2]
    if len(call.shape(0)) != 2 or len(call.shape(1)) != 3:
        return
    yield call.option(Shard(1), **{matrices: Shard(2)})
    yield call.option(SUM, **{rows: Shard(1), matrices: Shard(1)})
    yield call.option(SUM, "grouped_mm", **{matrices: Shard(0)})
    yield call.option(SUM, **{rows: SUM})
    yield call.option(SUM, **{matrices: SUM})
