"""Ops that move elements without computing: views, transposes, slices, joins.

A view splits its dims into the smallest groups that hold the same elements before and after. Ranks may share a group by
its first dim: a shard of it is a run of elements, before as after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall, Shape
from unisono.graph.rules.elementwise import aligned
from unisono.graph.rules.option import REPLICATE, SUM, Option
from unisono.graph.rules.registry import rule


def view_pairs(before: Shape, after: Shape) -> Iterator[tuple[int, int]]:
    """Dims that can be sharded together, before and after a view."""
    if not math.prod(before):
        return
    i = j = 0
    while i < len(before) and j < len(after):
        if before[i] == 1 or after[j] == 1:
            i, j = (i + 1, j) if before[i] == 1 else (i, j + 1)
            continue
        yield i, j
        mine, theirs = before[i], after[j]
        i, j = i + 1, j + 1
        while mine != theirs:
            if mine < theirs:
                mine, i = mine * before[i], i + 1
            else:
                theirs, j = theirs * after[j], j + 1


def moved(pairs: Iterable[tuple[int, int]], count: int = 1, local: str | None = None) -> Iterator[Option]:
    """Options of an op that takes dim `source` of its one input to dim `result` of its `count` outputs."""
    for source, result in pairs:
        yield Option((Shard(source),), (Shard(result),) * count, local)
    yield Option((SUM,), (SUM,) * count)


@rule("aten.view.default", "aten.reshape", "aten._unsafe_view", "aten.unflatten", "aten.flatten", "aten.view_as")
def view(call: OpCall) -> Iterator[Option]:
    for option in moved(view_pairs(call.shape(), call.result), local="view"):
        yield _with_more(option, call)


def _with_more(option: Option, call: OpCall) -> Option:
    """The option, with further tensors (a shape is taken from them) replicated."""
    return Option(option.inputs + (REPLICATE,) * (len(call.tensors) - 1), option.outputs, option.local)


@rule("aten.unsqueeze")
def unsqueeze(call: OpCall) -> Iterator[Option]:
    at = call.dim("dim", call.result)
    yield from moved((dim, dim + (dim >= at)) for dim in range(len(call.shape())))


@rule("aten.squeeze")
def squeeze(call: OpCall) -> Iterator[Option]:
    """As a view: a dim that sharding leaves with one element keeps its position, also where it is named."""
    kept = [dim for dim, size in enumerate(call.shape()) if not _squeezed(call, dim, size)]
    yield from moved(((dim, out_dim) for out_dim, dim in enumerate(kept)), local="view")


def _squeezed(call: OpCall, dim: int, size: int) -> bool:
    if size != 1 or "dim" not in call.arguments:
        return size == 1
    dims = call["dim"] if isinstance(call["dim"], list | tuple) else [call["dim"]]
    return dim in [given % len(call.shape()) for given in dims]


@rule("aten.transpose.int", "aten.t", "aten.numpy_T", "aten.mT", "aten.swapaxes", "aten.permute", "aten.movedim")
def permute(call: OpCall) -> Iterator[Option]:
    yield from moved((source, out_dim) for out_dim, source in enumerate(_order(call)))


def _order(call: OpCall) -> list[int]:
    ndim = len(call.shape())
    order = list(range(ndim))
    if "dims" in call.arguments:
        return [dim % ndim for dim in call["dims"]]
    if "source" in call.arguments:
        return _movedim_order(call, ndim)
    first, second = _swapped(call, ndim)
    order[first], order[second] = order[second], order[first]
    return order


def _swapped(call: OpCall, ndim: int) -> tuple[int, int]:
    for names in (("dim0", "dim1"), ("axis0", "axis1")):
        if names[0] in call.arguments:
            return call[names[0]] % ndim, call[names[1]] % ndim
    return (ndim - 2) % max(ndim, 1), (ndim - 1) % max(ndim, 1)


def _movedim_order(call: OpCall, ndim: int) -> list[int]:
    def listed(name: str) -> list[int]:
        value = call[name]
        return [dim % ndim for dim in (value if isinstance(value, list | tuple) else [value])]

    source, destination = listed("source"), listed("destination")
    rest = iter(dim for dim in range(ndim) if dim not in source)
    placed = dict(zip(destination, source, strict=True))
    return [placed[out_dim] if out_dim in placed else next(rest) for out_dim in range(ndim)]


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to")
def expand(call: OpCall) -> Iterator[Option]:
    more = (REPLICATE,) * (len(call.tensors) - 1)
    for dim in range(len(call.result)):
        yield Option((aligned(call.shape(), call.result, dim), *more), (Shard(dim),), "view")
    yield Option((SUM, *more), (SUM,))


@rule("aten.broadcast_tensors")
def broadcast_tensors(call: OpCall) -> Iterator[Option]:
    for dim in range(len(call.result)):
        given = tuple(aligned(shape, call.result, dim) for shape in call.shapes)
        yield Option(given, (Shard(dim),) * len(call.results), "broadcast_tensors")


@rule("aten.slice.Tensor", "aten.narrow", "aten.flip", "aten.roll", "aten.unfold")
def along_a_dim(call: OpCall) -> Iterator[Option]:
    """Whole along the dims where the result is not the input, element by element."""
    touched = _touched(call)
    pairs = ((dim, dim) for dim in range(len(call.shape())) if dim not in touched)
    for option in moved(pairs):
        yield _with_more(option, call)


def _touched(call: OpCall) -> set[int]:
    before, after = call.shape(), call.result
    changed = {dim for dim, size in enumerate(before) if after[dim] != size}
    name = "dims" if "dims" in call.arguments else "dim" if "dim" in call.arguments else ""
    if str(call.node.target).startswith("aten.slice"):
        return changed  # a slice of everything touches nothing
    if str(call.node.target).startswith("aten.roll") and not call["dims"]:
        return set(range(len(before)))  # it rolls the elements of all dims as one row
    if not name:
        return changed
    dims = call[name] if isinstance(call[name], list | tuple) else [call[name]]
    return changed | {dim % len(before) for dim in dims}


@rule("aten.pad", "aten.constant_pad_nd")
def pad(call: OpCall) -> Iterator[Option]:
    """Along dims that are not padded; linear only where zeros, or copies of the elements, are put on."""
    ndim = len(call.shape())
    padded = {ndim - 1 - i // 2 for i, count in enumerate(call["pad"]) if count}
    for option in moved((dim, dim) for dim in range(ndim) if dim not in padded):
        if option.outputs[0] != SUM or not call["value"]:
            yield option


@rule("aten.diff")
def diff(call: OpCall) -> Iterator[Option]:
    """Along one dim, of what is there with what is put before and after it."""
    mixed = call.dim("dim")
    for dim in range(len(call.shape())):
        if dim != mixed:
            yield Option((Shard(dim),) * len(call.tensors), (Shard(dim),))
    yield Option((SUM,) * len(call.tensors), (SUM,))


@rule("aten.select.int")
def select(call: OpCall) -> Iterator[Option]:
    gone = call.dim("dim")
    kept = [dim for dim in range(len(call.shape())) if dim != gone]
    yield from moved((dim, out_dim) for out_dim, dim in enumerate(kept))


@rule("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.tensor_split")
def split(call: OpCall) -> Iterator[Option]:
    gone = call.dim("dim")
    unbound = len(call.result) < len(call.shape())
    kept = [dim for dim in range(len(call.shape())) if dim != gone]
    pairs = enumerate(kept) if unbound else ((dim, dim) for dim in kept)
    flipped = ((dim, out_dim) for out_dim, dim in pairs) if unbound else pairs
    yield from moved(flipped, len(call.results))


@rule("aten.cat", "aten.concat", "aten.stack")
def join(call: OpCall) -> Iterator[Option]:
    count = len(call.tensors)
    at = call.dim("dim", call.result)
    new = len(call.result) > len(call.shape())
    for dim in range(len(call.result)):
        if dim != at:
            yield Option((Shard(dim - (new and dim > at)),) * count, (Shard(dim),))
    yield Option((SUM,) * count, (SUM,))


@rule("getitem")
def getitem(call: OpCall) -> Iterator[Option]:
    """One of an op's outputs, as it is placed."""
    for dim in range(len(call.result)):
        yield Option((Shard(dim),), (Shard(dim),))
    if call.results[0].is_floating_point():
        yield Option((SUM,), (SUM,))


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: OpCall) -> Iterator[Option]:
    if call["dim"] is None:  # of the elements of all dims as one row, of which the first dim splits runs
        yield from moved([(0, 0)] if call["output_size"] is None and call.shape() else [])
        return
    at = call.dim("dim")
    yield from moved((dim, dim) for dim in range(len(call.shape())) if dim != at)


@rule("aten.tril", "aten.triu")
def triangle(call: OpCall) -> Iterator[Option]:
    yield from moved((dim, dim) for dim in range(len(call.shape()) - 2))


@rule("aten.repeat")
def repeat(call: OpCall) -> Iterator[Option]:
    added = len(call.result) - len(call.shape())
    full_dims = (dim for dim in range(len(call.shape())) if call["repeats"][dim + added] == 1)
    yield from moved((dim, dim + added) for dim in full_dims)
