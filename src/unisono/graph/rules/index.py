"""Ops that read or write at an index: not sharded along the dims that are indexed, sharded along the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall, tensors_of
from unisono.graph.rules.elementwise import aligned
from unisono.graph.rules.option import REPLICATE, SUM, Option
from unisono.graph.rules.registry import rule
from unisono.mesh.placement import Placement


@rule("aten.gather")
def gather(call: OpCall) -> Iterator[Option]:
    """The index may be shorter than the input along other dims: sharded where they agree, as shards then do."""
    mixed = call.dim("dim")
    for dim in range(len(call.result)):
        if dim != mixed and call.shape("self")[dim] == call.shape("index")[dim]:
            yield call.option(Shard(dim), self=Shard(dim), index=Shard(dim))
    yield call.option(Shard(mixed), index=Shard(mixed))
    if call.results[0].is_floating_point():
        yield call.option(SUM, self=SUM)


@rule("aten.index_select")
def index_select(call: OpCall) -> Iterator[Option]:
    mixed = call.dim("dim")
    for dim in range(len(call.result)):
        yield call.option(Shard(dim), **({"index": Shard(0)} if dim == mixed else {"self": Shard(dim)}))
    yield call.option(SUM, self=SUM)


@rule("aten.index.Tensor")
def index(call: OpCall) -> Iterator[Option]:
    """Dims without an index are sharded together; dims of the indices, which are broadcast, along the indices."""
    layout = _Indexed(call)
    for dim, out_dim in layout.kept:
        yield call.option(Shard(out_dim), self=Shard(dim), indices=[REPLICATE] * layout.count)
    for dim in range(len(layout.broadcast)):
        yield call.option(Shard(layout.start + dim), indices=layout.along(dim))
    if call.results[0].is_floating_point():
        yield call.option(SUM, self=SUM, indices=[REPLICATE] * layout.count)


@rule("aten.index_put")
def index_put(call: OpCall) -> Iterator[Option]:
    """Cut along dims without an index; what is written is broadcast to what the index reads there."""
    if any(given is not None and given.meta["val"].dtype in (torch.bool, torch.uint8) for given in call["indices"]):
        yield from _masked(call)
        return
    layout = _Indexed(call)
    read = layout.read
    for dim, out_dim in layout.kept:
        values = aligned(call.shape("values"), read, out_dim)
        yield call.option(Shard(dim), self=Shard(dim), indices=[REPLICATE] * layout.count, values=values)
    if call["accumulate"]:
        yield call.option(SUM, self=SUM, indices=[REPLICATE] * layout.count, values=SUM)


def _masked(call: OpCall) -> Iterator[Option]:
    """One number where a mask is true: sharded along any dim, with the mask where it has that dim."""
    out_dims = [out_dim for out_dim, given in enumerate(call["indices"]) if given is not None]
    if len(out_dims) != 1 or math.prod(call.shape("values")) != 1:
        return
    mask = call.shape("indices")
    for dim in range(len(call.result)):
        own = dim - out_dims[0]
        shard = Shard(own) if 0 <= own < len(mask) else REPLICATE
        yield call.option(Shard(dim), self=Shard(dim), indices=[shard])


class _Indexed:
    """What x[indices] does with x's dims."""

    def __init__(self, call: OpCall) -> None:
        self.shape = call.shape("self")
        given: list[Any] = [*call["indices"], *[None] * (len(self.shape) - len(call["indices"]))]
        shapes = [None if item is None else tuple(tensors_of(item.meta["val"])[0].shape) for item in given]
        self.index_shapes = [shape for shape in shapes if shape is not None]
        self.count = len(self.index_shapes)
        indexed = [dim for dim, shape in enumerate(shapes) if shape is not None]
        ndim = max(map(len, self.index_shapes))
        padded = [(1,) * (ndim - len(shape)) + shape for shape in self.index_shapes]
        self.broadcast = tuple(max(sizes) for sizes in zip(*padded, strict=True))
        together = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
        self.start = indexed[0] if together else 0  # where the indices' dims stand in the result
        rest = [dim for dim in range(len(self.shape)) if dim not in indexed]
        out_dims = [out_dim for out_dim in range(len(rest) + ndim) if not self.start <= out_dim < self.start + ndim]
        self.kept = list(zip(rest, out_dims, strict=True))

    @property
    def read(self) -> tuple[int, ...]:
        shape = [0] * (len(self.kept) + len(self.broadcast))
        shape[self.start : self.start + len(self.broadcast)] = self.broadcast
        for dim, out_dim in self.kept:
            shape[out_dim] = self.shape[dim]
        return tuple(shape)

    def along(self, dim: int) -> list[Placement]:
        return [aligned(shape, self.broadcast, dim) for shape in self.index_shapes]


@rule("aten.scatter.src", "aten.scatter.value", "aten.scatter_add", "aten.index_add")
def scatter(call: OpCall) -> Iterator[Option]:
    """Cut along other dims where everything has the same length."""
    mixed = call.dim("dim")
    vector = "index_add" in str(call.node.target)
    shapes = {name: call.shape(name) for name in call.names if not (vector and name == "index")}
    for dim in range(len(call.result)):
        if dim != mixed and len({shape[dim] for shape in shapes.values()}) == 1:
            yield call.option(Shard(dim), **{name: Shard(dim) for name in shapes})


@rule("aten.select_scatter", "aten.slice_scatter")
def put_back(call: OpCall) -> Iterator[Option]:
    mixed = call.dim("dim")
    gone = len(call.shape("src")) < len(call.shape("self"))
    for dim in range(len(call.result)):
        if dim != mixed:
            yield call.option(Shard(dim), self=Shard(dim), src=Shard(dim - (gone and dim > mixed)))
    yield call.option(SUM, self=SUM, src=SUM)
