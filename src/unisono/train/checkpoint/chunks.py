"""Chunks: a rank's shard of a tensor as boxes of the full tensor, and the boxes that this rank writes.

A layout may assign any indices along a dim to a rank (the heads of q, k and v are three runs). Every product of runs is
a box, the unit of storage. Replicas divide the writing: a large chunk is split among them along its first dim, a small
one is written by the rank that a hash of its name selects. All of it follows from the layout, without communication.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import Layout, Split

MIN_SPLIT = 1 << 18  # bytes for each rank, from which a chunk is split


class Chunk(NamedTuple):
    offsets: tuple[int, ...]  # of its first element in the full tensor
    sizes: tuple[int, ...]
    local: tuple[int, ...]  # of its first element in this rank's shard

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its slices of this rank's shard."""
        return tuple(slice(first, first + size) for first, size in zip(self.local, self.sizes, strict=True))

    def narrow(self, first: int, last: int) -> Chunk:
        """A slice of it along dim 0."""
        return Chunk(
            (self.offsets[0] + first, *self.offsets[1:]),
            (last - first, *self.sizes[1:]),
            (self.local[0] + first, *self.local[1:]),
        )


def full_chunk(shape: Sequence[int]) -> Chunk:
    return Chunk((0,) * len(shape), tuple(shape), (0,) * len(shape))


def held_chunks(shape: Sequence[int], layout: Layout, mesh: Mesh) -> list[Chunk]:
    """This rank's chunks of a full tensor of that shape."""
    by_dim = [[split for split in layout.splits if split.dim == dim] for dim in range(len(shape))]
    runs = [_runs(length, splits, mesh) for length, splits in zip(shape, by_dim, strict=True)]
    chunks = []
    for box in product(*runs):
        offsets, sizes, local = zip(*box, strict=True) if box else ((), (), ())
        chunks.append(Chunk(offsets, sizes, local))
    return chunks


def _runs(length: int, splits: Sequence[Split], mesh: Mesh) -> list[tuple[int, int, int]]:
    """(first global index, length, first local index) for each run of consecutive indices along a dim."""
    if not splits:
        return [(0, length, 0)] if length else []
    held = np.arange(length)
    for split in splits:
        held = held[np.asarray(split.held[mesh.index(*split.axes)], dtype=np.int64)]
    if not len(held):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(held) != 1) + 1])
    lengths = np.diff([*starts, len(held)])
    return [(int(held[start]), int(length), int(start)) for start, length in zip(starts, lengths, strict=True)]


def written_chunks(name: str, chunks: Sequence[Chunk], itemsize: int, layout: Layout, mesh: Mesh) -> list[Chunk]:
    """The chunks, or parts of them, that this rank and no other writes."""
    axes = _replica_axes(layout, mesh)
    count, index = (mesh.size(*axes), mesh.index(*axes)) if axes else (1, 0)
    if count == 1:
        return list(chunks)
    mine = []
    for chunk in chunks:
        size = math.prod(chunk.sizes) * itemsize
        if chunk.sizes and chunk.sizes[0] >= count and size >= count * MIN_SPLIT:
            part = Split.even((), 0, chunk.sizes[0], count).held[index]
            mine.append(chunk.narrow(part[0], part[-1] + 1))
        elif zlib.crc32(name.encode()) % count == index:
            mine.append(chunk)
    return mine


def writes_metadata(layout: Layout, mesh: Mesh) -> bool:
    """Whether this rank, of all in its stage that hold a part of a tensor, writes what is common to them."""
    for split in layout.splits:
        holders = [rank for rank, held in enumerate(split.held) if len(held)]
        if holders and mesh.index(*split.axes) != holders[0]:
            return False
    axes = _replica_axes(layout, mesh)
    return not axes or mesh.index(*axes) == 0


def _replica_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the tensor is replicated within a stage."""
    return tuple(axis for axis in mesh.names if axis not in layout.axes and axis != "pp")
