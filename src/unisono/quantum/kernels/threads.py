"""Threads for kernels that release the interpreter: as many as torch uses, started on first use, anew after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock

import torch

_FIRST = 1 << 15  # bytes
_pools: dict[tuple[int, int], tuple[ThreadPoolExecutor, Lock]] = {}


def count() -> int:
    return max(1, torch.get_num_threads())


def together(call: Callable[[int], None], threads: int) -> None:
    """call(0), call(1), ... at once; the first error of any is raised."""
    if threads == 1:
        call(0)
        return
    pool, whole = _pool(threads)
    with whole:  # calls of a kernel wait for each other: those of two kernels must not share the threads
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
