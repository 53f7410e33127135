"""Chunks: where what a rank holds of a tensor lies in the whole, as boxes; and which of them this rank writes.

A layout may give a rank any indices along a dim (the heads of q, k and v are three runs). Every product of runs is a
box, which is what storage can name. Ranks that hold the same share the writing: a large chunk is cut among them along
its first dim, a small one goes to the rank that its name points at. All that follows from the layout, so the ranks need
not ask each other.
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

WORTH_CUTTING = 1 << 18  # bytes a rank


class Chunk(NamedTuple):
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    sizes: tuple[int, ...]
    local: tuple[int, ...]  # of its first element in what this rank holds

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies in what this rank holds."""
        return tuple(slice(first, first + size) for first, size in zip(self.local, self.sizes, strict=True))

    def rows(self, first: int, last: int) -> Chunk:
        """Some of its rows."""
        return Chunk(
            (self.offsets[0] + first, *self.offsets[1:]),
            (last - first, *self.sizes[1:]),
            (self.local[0] + first, *self.local[1:]),
        )


def whole_chunk(shape: Sequence[int]) -> Chunk:
    return Chunk((0,) * len(shape), tuple(shape), (0,) * len(shape))


def held_chunks(shape: Sequence[int], layout: Layout, mesh: Mesh) -> list[Chunk]:
    """What this rank holds of a whole tensor of that shape."""
    cuts = [[split for split in layout.splits if split.dim == dim] for dim in range(len(shape))]
    runs = [_runs(length, splits, mesh) for length, splits in zip(shape, cuts, strict=True)]
    chunks = []
    for box in product(*runs):
        offsets, sizes, local = zip(*box, strict=True) if box else ((), (), ())
        chunks.append(Chunk(offsets, sizes, local))
    return chunks


def _runs(length: int, splits: Sequence[Split], mesh: Mesh) -> list[tuple[int, int, int]]:
    """(first index in the whole, how many, first index here) for each run of consecutive indices along a dim."""
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
    """Those of the chunks that this rank holds, or parts of them, that it and no other writes."""
    axes = _replica_axes(layout, mesh)
    count, index = (mesh.size(*axes), mesh.index(*axes)) if axes else (1, 0)
    if count == 1:
        return list(chunks)
    mine = []
    for chunk in chunks:
        size = math.prod(chunk.sizes) * itemsize
        if chunk.sizes and chunk.sizes[0] >= count and size >= count * WORTH_CUTTING:
            rows = Split.even((), 0, chunk.sizes[0], count).held[index]
            mine.append(chunk.rows(rows[0], rows[-1] + 1))
        elif zlib.crc32(name.encode()) % count == index:
            mine.append(chunk)
    return mine


def speaks(layout: Layout, mesh: Mesh) -> bool:
    """Whether this rank, of all that hold something of a tensor in its stage, is the one that tells what is common."""
    for split in layout.splits:
        holders = [rank for rank, held in enumerate(split.held) if len(held)]
        if holders and mesh.index(*split.axes) != holders[0]:
            return False
    axes = _replica_axes(layout, mesh)
    return not axes or mesh.index(*axes) == 0


def _replica_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Along these, ranks of a stage hold the same of a tensor."""
    return tuple(axis for axis in mesh.names if axis not in layout.axes and axis != "pp")
