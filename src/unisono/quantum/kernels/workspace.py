"""Threads and memory of the CPU kernels.

Threads for kernels that release the interpreter: as many as torch uses, started on first use, again after a fork. A
Workspace holds a tile or more for each thread, and a program with the numbers of a batch. It is allocated and written
once, and used by every program after that: a run allocates nothing beside its state and has no page faults. Runs at the
same time have one each.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_FIRST = 1 << 15  # bytes
_pools: dict[tuple[int, int], tuple[ThreadPoolExecutor, Lock]] = {}


def count() -> int:
    return max(1, torch.get_num_threads())


def together(call: Callable[[int], None], threads: int) -> None:
    """call(0), call(1), ... at once; the first error of any is raised."""
    if threads == 1:
        call(0)
        return
    pool, lock = _pool(threads)
    with lock:  # calls of a kernel wait for each other: those of two kernels must not share the threads
        others = [pool.submit(call, number) for number in range(1, threads)]
    call(0)
    for other in others:
        other.result()


def start(threads: int) -> None:
    """Start those that `together` will want."""
    here = Barrier(threads)

    def arrive(_: int) -> None:
        here.wait()
        bytes(b"0" * _FIRST)  # a thread's own heap begins with its first allocation

    together(arrive, threads)


def _pool(threads: int) -> tuple[ThreadPoolExecutor, Lock]:
    key = (os.getpid(), threads)
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads - 1, thread_name_prefix="unisono-quantum"), Lock()
    return _pools[key]


_TILE = 1 << 18  # bytes
_ARRAYS = 5 << 18
_LINE = 64
_free: list[Workspace] = []


class Workspace:
    """`holds` is the user of the arrays that were requested last, set by that user."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], NDArray[np.uint8]] = {}
        self.holds: Any = None
        for thread in range(count()):
            self._buffer(f"tile of {thread}", 0, _TILE)
        self._buffer("arrays", 0, _ARRAYS)
        start(count())

    def tile(self, thread: int, size: int, dtype: Any, number: int = 0) -> NDArray:
        """A thread's tile of `size` numbers; what was in it before is still there."""
        wanted = size * np.dtype(dtype).itemsize
        return self._buffer(f"tile of {thread}", number, wanted)[:wanted].view(dtype)

    def arrays(self, forms: Sequence[tuple[tuple[int, ...], Any]]) -> list[NDArray]:
        """Arrays of these shapes and dtypes, each from a cache line on, instead of those before."""
        self.holds = None
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in forms]
        ends = list(itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes))
        buffer = self._buffer("arrays", 0, ends[-1])
        return [
            buffer[begin : begin + size].view(dtype).reshape(shape)
            for (shape, dtype), size, begin in zip(forms, sizes, [0, *ends], strict=False)
        ]

    def _buffer(self, name: str, number: int, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes that begin at a cache line."""
        key = (name, number)
        if key not in self._buffers or len(self._buffers[key]) < size:
            self._buffers.pop(key, None)
            buffer = np.empty(size + _LINE, dtype=np.uint8)
            buffer.fill(0)
            start = -buffer.ctypes.data % _LINE
            self._buffers[key] = buffer[start : start + size]
        return self._buffers[key]


@contextmanager
def workspace() -> Iterator[Workspace]:
    """One that nobody else uses meanwhile."""
    mine = _free.pop() if _free else Workspace()
    try:
        yield mine
    finally:
        _free.append(mine)
