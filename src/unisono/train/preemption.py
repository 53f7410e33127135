"""Preemption: SIGTERM, which schedulers send before they take a machine away; and the end of a run's time.

The signal reaches ranks at different times, and their clocks differ, so none may act alone: an all_reduce, which
overlaps with the step, informs all ranks whether any of them is to stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.launch.outcome import failure

GRACE = 60.0  # seconds between SIGTERM and SIGKILL that the launcher grants, for a step and a checkpoint
_GRACE_VARIABLE = "UNISONO_GRACE"  # overrides it


NOT, OUT_OF_TIME, TERMINATED = range(3)  # reasons to stop; of several ranks' reasons, the largest is that of all


class Preemption:
    """Notes SIGTERM while `listening`. Every rank calls `start_check` before a step and `reason` after it."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._reason = NOT
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: Handle | None = None

    def request(self, reason: int = TERMINATED) -> None:
        """Stop all ranks after the next step."""
        self._reason = max(self._reason, reason)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self.request()

        before = signal.signal(signal.SIGTERM, note)
        failure.request_grace(float(os.environ.get(_GRACE_VARIABLE, GRACE)))
        try:
            yield
        finally:
            failure.request_grace(0)
            signal.signal(signal.SIGTERM, before)

    def start_check(self) -> None:
        if self._comm.size > 1:
            self._flag.fill_(self._reason)
            self._pending = self._comm.all_reduce(self._flag, "max", async_op=True)

    def reason(self) -> int:
        """Why all ranks stop after this step; NOT if none of them had a reason when the step began."""
        if self._comm.size == 1:
            return self._reason
        assert self._pending is not None
        self._pending.wait()
        return int(self._flag.item())
