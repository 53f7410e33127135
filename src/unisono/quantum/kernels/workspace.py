"""Memory that the CPU kernels work in: a tile or more for each thread, and the numbers of a batch of sweeps.

It is made once, whole and written to, threads started, and used by every program after that: a run takes no memory
beside its state, and waits for no page of it. Runs at the same time have one each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.kernels.threads import count, start

_TILE = 1 << 18  # bytes
_VALUES = 5 << 18
_LINE = 64
_free: list[Workspace] = []


class Workspace:
    """`holds` says which numbers `values` has; who fills it writes it."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, int], NDArray[np.uint8]] = {}
        self.holds: object = None
        for thread in range(count()):
            self._room(f"tile of {thread}", 0, _TILE)
        self._room("values", 0, _VALUES)
        start(count())

    def tile(self, thread: int, size: int, dtype: Any, number: int = 0) -> NDArray:
        """A thread's tile of `size` numbers; what was in it before is still there."""
        return self._numbers(f"tile of {thread}", number, size, dtype)

    def values(self, size: int, dtype: Any) -> NDArray:
        return self._numbers("values", 0, size, dtype)

    def _numbers(self, name: str, number: int, size: int, dtype: Any) -> NDArray:
        wanted = size * np.dtype(dtype).itemsize
        return self._room(name, number, wanted)[:wanted].view(dtype)

    def _room(self, name: str, number: int, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes that begin at a cache line."""
        key = (name, number)
        if key not in self._rooms or len(self._rooms[key]) < size:
            self._rooms.pop(key, None)
            if name == "values":
                self.holds = None
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
