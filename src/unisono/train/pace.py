"""Which rank the others wait for.

Times of whole steps are equal on all ranks: they wait for each other. What differs is how much of it a rank spends on
its own work. A thread looks now and then at what the main thread does; a frame inside a collective counts as waiting.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch

from unisono.comm.communicator import Communicator
from unisono.launch.threads import frames_of

_PAUSE = 0.02  # seconds between looks
_STANDS_OUT = 1.5  # times the median of the others' own work, or more
_SHARE = 0.25  # of the time that the slow one must have been busy beyond the others, to be worth a word
_WAITING = (
    os.path.dirname(os.path.abspath(sys.modules[Communicator.__module__].__file__ or "")),
    os.path.join(os.path.dirname(torch.__file__), "distributed"),
)


class Pace:
    """Between `start` and `stop`, how long this rank's main thread worked and how long it waited for others."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._own = 0
        self._looks = 0
        self._since = time.perf_counter()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._look, name="unisono-pace", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._stopping.wait(_PAUSE):
            waits = any(frame.f_code.co_filename.startswith(_WAITING) for frame in frames_of(self._main))
            self._looks += 1
            self._own += not waits

    def own_seconds(self) -> tuple[float, float]:
        """Seconds of own work, and all seconds, since the last call."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        share = self._own / self._looks if self._looks else 0.0
        self._own = self._looks = 0
        return share * passed, passed


def slowest(own: list[float], passed: float, hosts: list[str]) -> str:
    """The rank that stands out, as a sentence; nothing where none does."""
    if len(own) < 2 or passed <= 0:
        return ""
    rank = max(range(len(own)), key=own.__getitem__)
    others = sorted(own[:rank] + own[rank + 1 :])
    middle = others[len(others) // 2]
    if own[rank] < _STANDS_OUT * middle or own[rank] - middle < _SHARE * passed:
        return ""
    return (
        f"rank {rank} on {hosts[rank]} is slow: it was busy {100 * own[rank] / passed:.0f}% of the time, "
        f"the others {100 * middle / passed:.0f}%: they wait for it"
    )
