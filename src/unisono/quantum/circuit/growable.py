"""A list and an array that grow without leaving freed blocks behind, for what is collected while a circuit is compiled.

A list that grows is moved from block to block of the heap, and the C library keeps blocks that it leaves, up to seven
of a size: pages that are then there beside a large state. A chunk never outgrows what is a small object to Python,
which has memory of its own for those and uses it again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

CHUNK = 56  # items: a tuple of them has 488 bytes, and a list that grows to them 512
_FIRST = 1 << 11  # bytes; and then twice as many. The C library keeps blocks of 1 KiB and less when they are freed

T = TypeVar("T")


class ChunkedList(Generic[T]):
    """A list in chunks; grows at its end."""

    __slots__ = ("_chunks", "_last")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._last: list[T] = []
        self._chunks = [self._last]
        self.extend(items)

    def append(self, item: T) -> None:
        if len(self._last) == CHUNK:
            self._last = []
            self._chunks.append(self._last)
        self._last.append(item)

    def extend(self, items: Iterable[T]) -> None:
        for item in items:
            self.append(item)

    def __len__(self) -> int:
        return CHUNK * (len(self._chunks) - 1) + len(self._last)

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(self._chunks)


class Numbers:
    """Numbers in an array with room for more."""

    def __init__(self, dtype: Any) -> None:
        self._room: NDArray = np.empty(_FIRST // np.dtype(dtype).itemsize, dtype=dtype)
        self._count = 0

    def append(self, number: float) -> None:
        self.extend((number,))

    def extend(self, numbers: Sequence[float] | NDArray) -> None:
        end = self._count + len(numbers)
        if end > len(self._room):
            larger = np.empty(max(end, 2 * len(self._room)), dtype=self._room.dtype)
            larger[: self._count] = self._room[: self._count]
            self._room = larger
        self._room[self._count : end] = numbers
        self._count = end

    def __len__(self) -> int:
        return self._count

    @property
    def array(self) -> NDArray:
        """What was collected; no copy, so that the room stays as long as this does."""
        return self._room[: self._count]
