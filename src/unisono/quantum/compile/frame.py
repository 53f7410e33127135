"""Bits of a tile as parities of its rows: how CNOT, X and SWAP cost nothing.

Within a tile, the bit of an axis is the parity of some row bits, lane bits and outside bits (kernels/code.py defines
what those are). A CNOT adds the parity of its control to that of its target, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unisono.quantum.kernels.code import ONE


@dataclass(frozen=True)
class Parity:
    """The bit that is the parity of (rows & row) + (lanes & lane) + (outside & tile number)."""

    rows: int = 0
    lanes: int = 0
    outside: int = 0

    def __xor__(self, other: Parity) -> Parity:
        return Parity(self.rows ^ other.rows, self.lanes ^ other.lanes, self.outside ^ other.outside)


SKEW = 8  # 2^8 rows of 64 bytes: as many as the first-level cache has sets


@dataclass(frozen=True)
class TileLayout:
    """Which bits of the index are row bits, lane bits and outside bits; bit 0 is the least significant."""

    rows: tuple[int, ...]
    lanes: tuple[int, ...]
    outside: tuple[int, ...]
    skew: int = SKEW


def skew(count: int, every: int = SKEW) -> tuple[list[int], list[int]]:
    """Where a tile's rows begin: the mask and the parity of each of `count` row bits.

    Row bit j + every also moves a row by bit j, so that rows that differ in high bits alone do not meet in one cache
    set, or in one bank of a GPU's shared memory."""
    masks = [1 << j | (1 << (j - every) if j >= every else 0) for j in range(count)]
    parities = [sum(1 << i for i in range(j, count, every)) for j in range(count)]
    return masks, parities


class Frame:
    """`parity[b]` is what bit b is now; `mask[b]`, for a row bit, the rows that differ in bit b and in no other."""

    def __init__(self, layout: TileLayout) -> None:
        self.parity: dict[int, Parity] = {}
        self.mask: dict[int, int] = {}
        masks, parities = skew(len(layout.rows), layout.skew)
        for number, bit in enumerate(layout.rows):
            self.parity[bit] = Parity(rows=parities[number])
            self.mask[bit] = masks[number]
        for number, bit in enumerate(layout.lanes):
            self.parity[bit] = Parity(lanes=1 << number)
        for number, bit in enumerate(layout.outside):
            self.parity[bit] = Parity(outside=1 << number)

    def flip(self, target: int, control: int | None) -> None:
        """X on a row bit, under a control that is no lane."""
        if control is None:
            self.parity[target] ^= Parity(outside=ONE)
            return
        self.parity[target] ^= self.parity[control]
        if control in self.mask:
            self.mask[control] ^= self.mask[target]

    def group(self, bits: Iterable[int]) -> Parity:
        """The parity of several bits together."""
        total = Parity()
        for bit in bits:
            total ^= self.parity[bit]
        return total


class Basis:
    """Parities as independent row masks, so that outside bits can be met by shifting the rows.

    After `reduce(p)` for every parity p in use: rows shifted by all `flips` whose outside parity is odd read p as
    (p.rows & shifted row) alone, but for the outside bits that `reduce` returned."""

    def __init__(self) -> None:
        self._reduced: dict[int, tuple[int, int]] = {}  # pivot -> (rows, outside); a pivot occurs in its own rows only

    def reduce(self, parity: Parity) -> int:
        """Outside bits by which the parity differs from what the basis makes of its rows; extends the basis."""
        rows, outside = parity.rows, parity.outside
        for pivot, (base, with_it) in self._reduced.items():
            if rows >> pivot & 1:
                rows, outside = rows ^ base, outside ^ with_it
        if not rows:
            return outside
        pivot = rows.bit_length() - 1
        for other, (base, with_it) in list(self._reduced.items()):
            if base >> pivot & 1:
                self._reduced[other] = (base ^ rows, with_it ^ outside)
        self._reduced[pivot] = (rows, outside)
        return 0

    @property
    def flips(self) -> list[tuple[int, int]]:
        """(outside mask, row mask) pairs."""
        return [(outside, 1 << pivot) for pivot, (_, outside) in self._reduced.items() if outside]


def odd(word: int) -> int:
    return word.bit_count() & 1
