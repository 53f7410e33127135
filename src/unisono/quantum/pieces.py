"""A list in pieces, for what is collected while a circuit is made ready.

A list that grows is moved from block to block of the heap, and the C library keeps blocks that it leaves, up to seven
of a size: pages that are then there beside a large state. A piece never outgrows what is a small object to Python,
which has memory of its own for those and uses it again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

PIECE = 56  # items: a tuple of them has 488 bytes, and a list that grows to them 512

T = TypeVar("T")


class Pieces(Generic[T]):
    """Grows at its end."""

    __slots__ = ("_last", "_pieces")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._last: list[T] = []
        self._pieces = [self._last]
        self.extend(items)

    def append(self, item: T) -> None:
        if len(self._last) == PIECE:
            self._last = []
            self._pieces.append(self._last)
        self._last.append(item)

    def extend(self, items: Iterable[T]) -> None:
        for item in items:
            self.append(item)

    def __len__(self) -> int:
        return PIECE * (len(self._pieces) - 1) + len(self._last)

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(self._pieces)
