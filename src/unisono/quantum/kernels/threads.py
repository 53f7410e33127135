"""Threads for kernels that release the interpreter: as many as torch uses, started on first use, anew after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def count() -> int:
    return max(1, torch.get_num_threads())


def together(call: Callable[[int], None], threads: int) -> None:
    """call(0), call(1), ... at once; the first error of any is raised."""
    if threads == 1:
        call(0)
        return
    key = (os.getpid(), threads)
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads - 1, thread_name_prefix="unisono-quantum")
    others = [_pools[key].submit(call, number) for number in range(1, threads)]
    call(0)
    for other in others:
        other.result()
