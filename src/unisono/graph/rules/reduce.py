"""Reductions: sharded along what stays; sums and means also along what is summed, which leaves a part of the sum."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall
from unisono.graph.rules.option import REPLICATE, SUM, Option
from unisono.graph.rules.registry import rule


def reduced_dims(call: OpCall) -> set[int]:
    """The dims that an op reduces, from its argument dim: one, some, or (left out, None or empty) all."""
    ndim = len(call.shape())
    given = call.arguments.get("dim")
    if given is None or given == []:
        return set(range(ndim))
    return {dim % max(ndim, 1) for dim in (given if isinstance(given, list | tuple) else [given])}


def kept_pairs(call: OpCall) -> Iterator[tuple[int, int]]:
    """Dims that stay: where in the input, where in the result."""
    gone = reduced_dims(call)
    keeps = bool(call.arguments.get("keepdim", False)) or len(call.result) == len(call.shape())
    out_dim = 0
    for dim in range(len(call.shape())):
        if dim not in gone:
            yield dim, dim if keeps else out_dim
            out_dim += 1


def sharded_along_kept(call: OpCall) -> Iterator[Option]:
    for dim, out_dim in kept_pairs(call):
        yield Option((Shard(dim),), (Shard(out_dim),) * len(call.results))


@rule("aten.sum", "aten.nansum")
def total(call: OpCall) -> Iterator[Option]:
    yield from sharded_along_kept(call)
    for dim in sorted(reduced_dims(call)):
        yield Option((Shard(dim),), (SUM,))
    yield Option((SUM,), (SUM,))


@rule("aten.var.correction", "aten.var.dim", "aten.var.default")
def variance(call: OpCall) -> Iterator[Option]:
    """Along what is reduced, ranks find the mean together and then add up what parts from it."""
    yield from sharded_along_kept(call)
    for dim in sorted(reduced_dims(call)):
        yield Option((Shard(dim),), (REPLICATE,), "variance")


@rule("aten.mean")
def mean(call: OpCall) -> Iterator[Option]:
    yield from sharded_along_kept(call)
    for dim in sorted(reduced_dims(call)):
        yield Option((Shard(dim),), (SUM,), "mean")
    yield Option((SUM,), (SUM,))


@rule(
    "aten.amax", "aten.amin", "aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin", "aten.std",
    "aten.var_mean", "aten.std_mean", "aten.prod.dim_int", "aten.any.dim", "aten.all.dim", "aten.any.dims",
    "aten.logsumexp", "aten.median.dim", "aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim", "aten.count_nonzero",
    "aten.any.default", "aten.all.default", "aten.max.default", "aten.min.default",
)  # fmt: skip
def reduction(call: OpCall) -> Iterator[Option]:
    yield from sharded_along_kept(call)


@rule("aten.cumsum", "aten.cumprod", "aten.sort", "aten.argsort", "aten.topk", "aten.logcumsumexp", "aten.cummax")
def along(call: OpCall) -> Iterator[Option]:
    """Ops that give as many dims as they take and mix one of them."""
    mixed = call.dim("dim")
    for dim in range(len(call.shape())):
        if dim != mixed:
            yield Option((Shard(dim),), (Shard(dim),) * len(call.results))


@rule("aten.histc", "aten.bincount", "aten.nonzero", "aten.unique_dim", "aten.one_hot")
def over_all(call: OpCall) -> Iterator[Option]:
    """Mixes everything: only replicated."""
    yield from ()
