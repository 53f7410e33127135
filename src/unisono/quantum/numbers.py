"""Numbers that are collected one after the other, in an array with room for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FIRST = 1 << 11  # bytes; and then twice as many. The C library keeps blocks of 1 KiB and less when they are freed


class Numbers:
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
