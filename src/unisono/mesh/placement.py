"""Placements: how a tensor is distributed over a mesh, one placement for each axis of the mesh.

`Shard(dim)`, `Replicate()` and `Partial(op)` are torch's own, so tensors can go to and fro between unisono and torch.
Several axes may shard one dim: the first shards it, the next shards each shard again. Shards are those of torch.chunk,
so the last ones may be smaller, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh

__all__ = ["Partial", "Placement", "Replicate", "Shard"]

Placements = tuple[Placement, ...]

PARTIAL_OPS = ("sum", "avg", "product", "min", "max")
_LINEAR = {"sum", "avg"}


def is_partial(placement: Placement, op: str | None = None) -> bool:
    return isinstance(placement, Partial) and op in (None, placement.reduce_op)


def shard_dim(placement: Placement) -> int | None:
    """The dim that a placement shards; None when it shards none."""
    kind = type(placement)  # asked millions of times, and isinstance is slow for torch's placements
    if kind is Shard:
        return placement.dim  # type: ignore[attr-defined]
    if kind is Replicate or kind is Partial:
        return None
    return placement.dim if isinstance(placement, Shard) else None


def checked(placements: Sequence[Placement], mesh: Mesh, ndim: int) -> Placements:
    """The placements of a tensor of `ndim` dims on `mesh`, with dims counted from 0; UsageError where they are off."""
    if not isinstance(mesh, Mesh):
        raise UsageError(f"mesh is {mesh!r}; expected a uni.Mesh")
    if not isinstance(placements, tuple | list) or len(placements) != mesh.ndim:
        raise UsageError(f"placements {placements} on {mesh}: expected a list of {mesh.ndim}, one an axis")
    normal = tuple(_normal(placement, ndim) for placement in placements)
    ops = {placement.reduce_op for placement in normal if isinstance(placement, Partial)}
    if len(ops) > 1 and ops - _LINEAR:
        raise UsageError(
            f"placements {normal} mix {' and '.join(sorted(ops))}, whose order would matter; reduce one first"
        )
    return normal


def _normal(placement: Placement, ndim: int) -> Placement:
    if type(placement) is Shard:
        if not -ndim <= placement.dim < ndim:
            expected = f"a dim from {-ndim} to {ndim - 1}" if ndim else "Replicate(), as a number cannot be sharded"
            raise UsageError(f"{placement} of a tensor with {ndim} dims; expected {expected}")
        return Shard(placement.dim % ndim)
    if type(placement) is Partial:
        if placement.reduce_op not in PARTIAL_OPS:
            raise UsageError(f"{placement}: expected one of {', '.join(PARTIAL_OPS)}")
        return placement
    if type(placement) is Replicate:
        return placement
    raise UsageError(f"placement {placement!r}: expected Shard(dim), Replicate() or Partial(op)")


def chunk_sizes(length: int, count: int) -> list[int]:
    """How torch.chunk splits a length, with empty shards at the end where it would return fewer."""
    full = -(-length // count)
    return [max(0, min(full, length - full * index)) for index in range(count)]


def nested_chunk_sizes(length: int, counts: Sequence[int]) -> list[int]:
    """The sizes when each axis shards what the one before it left, the last axis running fastest."""
    sizes = [length]
    for count in counts:
        sizes = [part for size in sizes for part in chunk_sizes(size, count)]
    return sizes


def local_box(
    shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], coordinate: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The local shape at a coordinate of the mesh (by default this rank's), and its offsets in the full tensor."""
    placements = checked(placements, mesh, len(shape))
    coordinate = mesh.coordinate() if coordinate is None else coordinate
    sizes, offsets = list(shape), [0] * len(shape)
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is not None:
            chunks = chunk_sizes(sizes[dim], mesh.shape[axis])
            offsets[dim] += sum(chunks[: coordinate[axis]])
            sizes[dim] = chunks[coordinate[axis]]
    return tuple(sizes), tuple(offsets)


def local_shape(
    shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], coordinate: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The shape of the shard at a coordinate of the mesh, by default this rank's."""
    return local_box(shape, mesh, placements, coordinate)[0]


def fair_shape(
    shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The same for shards whose sizes differ by one at most, which are the same wherever ranks share evenly."""
    sizes = list(shape)
    for axis, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is not None:
            each, more = divmod(sizes[dim], mesh.shape[axis])
            sizes[dim] = each + (coordinate[axis] < more)
    return tuple(sizes)


def local_slice(tensor: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of a full tensor, as a view. Axes that are Partial count as Replicate."""
    sizes, offsets = local_box(tensor.shape, mesh, placements)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def global_shape(local: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The full tensor's shape, from every rank's local shape: a small collective on each axis that shards.

    UsageError where the local sizes are not those that torch.chunk would give.
    """
    placements = checked(placements, mesh, local.dim())
    shape = list(local.shape)
    for axis in reversed(range(mesh.ndim)):
        dim = shard_dim(placements[axis])
        if dim is None:
            continue
        sizes = [int(size) for size in mesh.comm(mesh.names[axis]).all_gather(torch.tensor([shape[dim]]))]
        if sizes != chunk_sizes(sum(sizes), mesh.shape[axis]):
            raise UsageError(
                f"the local sizes along dim {dim} on axis {mesh.names[axis]} are {sizes}; "
                f"expected {chunk_sizes(sum(sizes), mesh.shape[axis])}"
            )
        shape[dim] = sum(sizes)
    return tuple(shape)
