"""A meter of memory: the most that torch has had on a device since a moment.

On a GPU the allocator counts by itself. On a CPU nothing does but torch's profiler, so it runs along: what it counts is
what tensors take, to the byte, where the size of the process would tell of imported modules and of freed pages too.
"""

from __future__ import annotations

import gc
import os
import time
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


class Meter:
    """`with Meter(device) as meter:` around all that is to be counted; `peak` is for after the block."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._since = 0
        self._profiler: Any = None
        self.peak = 0.0  # bytes, at most since `restart`

    def __enter__(self) -> Meter:
        gc.collect()  # what is let go only later, and was there before, would be taken off the count
        if not self._is_gpu:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it tells on stderr that it starts and stops
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def restart(self) -> None:
        """The peak is that of what follows; what is held already counts with it."""
        self._since = time.time_ns()
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_gpu:
            self.peak = float(torch.cuda.max_memory_allocated())
            return
        self._profiler.__exit__(kind, error, trace)
        if error is None:
            reported = sorted(_totals(self._profiler.profiler.kineto_results.experimental_event_tree()))
            before = reported[0][1] - reported[0][2] if reported else 0
            held = [total for when, total, _ in reported if when < self._since][-1:]
            later = [total for when, total, _ in reported if when >= self._since]
            self.peak = float(max([*held, *later], default=before) - before)


def _totals(events: list[Any]) -> list[tuple[int, int, int]]:
    """Of every allocation: when it was, what was allocated after it, and its own bytes (below zero where freed)."""
    found: list[tuple[int, int, int]] = []
    pending = list(events)
    while pending:
        event = pending.pop()
        total = getattr(event.extra_fields, "total_allocated", None)
        if total is not None:
            found.append((event.start_time_ns, total, event.extra_fields.alloc_size))
        pending += event.children
    return found
