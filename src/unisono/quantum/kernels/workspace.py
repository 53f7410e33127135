"""Memory that the CPU kernels work in: a tile or more for each thread, and a program with the numbers of a batch.

It is made once, whole and written to, threads started, and used by every program after that: a run takes no memory
beside its state, and waits for no page of it. Runs at the same time have one each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.kernels.threads import count, start

_TILE = 1 << 18  # bytes
_ARRAYS = 5 << 18
_LINE = 64
_free: list[Workspace] = []


class Workspace:
    """`holds` is what uses the arrays that were asked for last; who asks for them writes it."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, int], NDArray[np.uint8]] = {}
        self.holds: Any = None
        for thread in range(count()):
            self._room(f"tile of {thread}", 0, _TILE)
        self._room("arrays", 0, _ARRAYS)
        start(count())

    def tile(self, thread: int, size: int, dtype: Any, number: int = 0) -> NDArray:
        """A thread's tile of `size` numbers; what was in it before is still there."""
        wanted = size * np.dtype(dtype).itemsize
        return self._room(f"tile of {thread}", number, wanted)[:wanted].view(dtype)

    def arrays(self, forms: Sequence[tuple[tuple[int, ...], Any]]) -> list[NDArray]:
        """Arrays of these shapes and dtypes, each from a cache line on, in place of those before."""
        self.holds = None
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in forms]
        ends = list(itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes))
        room = self._room("arrays", 0, ends[-1])
        return [
            room[begin : begin + size].view(dtype).reshape(shape)
            for (shape, dtype), size, begin in zip(forms, sizes, [0, *ends], strict=False)
        ]

    def _room(self, name: str, number: int, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes that begin at a cache line."""
        key = (name, number)
        if key not in self._rooms or len(self._rooms[key]) < size:
            self._rooms.pop(key, None)
            room = np.empty(size + _LINE, dtype=np.uint8)
            room.fill(0)
            start = -room.ctypes.data % _LINE
            self._rooms[key] = room[start : start + size]
        return self._rooms[key]


@contextmanager
def workspace() -> Iterator[Workspace]:
    """One that nobody else uses meanwhile."""
    mine = _free.pop() if _free else Workspace()
    try:
        yield mine
    finally:
        _free.append(mine)
