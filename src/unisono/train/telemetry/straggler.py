"""Straggler detection: which rank the others wait for.

Step times are equal on all ranks, since ranks wait for each other. The difference is the part of a step that a rank
spends on its own work. A thread samples the stack of the main thread; a frame inside a collective counts as waiting.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch

from unisono.comm.communicator import Communicator
from unisono.launch.process_threads import frames_of

_INTERVAL = 0.02  # seconds between samples
_FACTOR = 1.5  # a straggler has at least so many times the median own work of the others
_MIN_EXCESS = 0.25  # and exceeds it by this fraction of the time
_WAITING = (
    os.path.dirname(os.path.abspath(sys.modules[Communicator.__module__].__file__ or "")),
    os.path.join(os.path.dirname(torch.__file__), "distributed"),
)


class BusyMonitor:
    """Between `start` and `stop`: how long this rank's main thread worked and how long it waited for others."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._own = 0
        self._samples = 0
        self._since = time.perf_counter()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._sample, name="unisono-straggler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._stopping.wait(_INTERVAL):
            waits = any(frame.f_code.co_filename.startswith(_WAITING) for frame in frames_of(self._main))
            self._samples += 1
            self._own += not waits

    def own_seconds(self) -> tuple[float, float]:
        """Seconds of own work, and of all, since the last call."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        share = self._own / self._samples if self._samples else 0.0
        self._own = self._samples = 0
        return share * passed, passed


def straggler_message(own: list[float], passed: float, hosts: list[str]) -> str:
    """One sentence about the straggler; "" if there is none."""
    if len(own) < 2 or passed <= 0:
        return ""
    rank = max(range(len(own)), key=own.__getitem__)
    others = sorted(own[:rank] + own[rank + 1 :])
    median = others[len(others) // 2]
    if own[rank] < _FACTOR * median or own[rank] - median < _MIN_EXCESS * passed:
        return ""
    return (
        f"rank {rank} on {hosts[rank]} is slow: it was busy {100 * own[rank] / passed:.0f}% of the time, "
        f"the others {100 * median / passed:.0f}%: they wait for it"
    )
