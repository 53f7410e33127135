"""Preemption: SIGTERM, which schedulers send before they take a machine away.

The signal reaches ranks at different times, so none may act on it alone: an all_reduce, which overlaps with the step,
informs all ranks whether any of them has received it.
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


class Preemption:
    """Notes SIGTERM while `listening`. Every rank calls `start_check` before a step and `was_requested` after it."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._requested = threading.Event()
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: Handle | None = None

    def request(self) -> None:
        """As if the signal had been received."""
        self._requested.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self._requested.set()

        before = signal.signal(signal.SIGTERM, note)
        failure.request_grace(float(os.environ.get(_GRACE_VARIABLE, GRACE)))
        try:
            yield
        finally:
            failure.request_grace(0)
            signal.signal(signal.SIGTERM, before)

    def start_check(self) -> None:
        if self._comm.size > 1:
            self._flag.fill_(int(self._requested.is_set()))
            self._pending = self._comm.all_reduce(self._flag, "max", async_op=True)

    def was_requested(self) -> bool:
        """Whether any rank had received the signal when the step began."""
        if self._comm.size == 1:
            return self._requested.is_set()
        assert self._pending is not None
        self._pending.wait()
        return bool(self._flag.item())
