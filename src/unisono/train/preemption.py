"""Being asked to go: SIGTERM, which schedulers send before they take a machine away.

The signal reaches ranks at different moments, so none may act on it alone: at the end of each step the ranks agree
whether any has been asked. The question travels while the step computes.
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

PATIENCE = 60.0  # seconds that the launcher gives ranks between SIGTERM and the end, for a step and a checkpoint
_GRACE = "UNISONO_GRACE"  # the same, as the user says


class Preemption:
    """Notes SIGTERM while it is `listening`; `ask` before a step and `was_asked` after it, on every rank."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._asked = threading.Event()
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._travelling: Handle | None = None

    def request(self) -> None:
        """As if the signal had come."""
        self._asked.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self._asked.set()

        before = signal.signal(signal.SIGTERM, note)
        failure.request_grace(float(os.environ.get(_GRACE, PATIENCE)))
        try:
            yield
        finally:
            failure.request_grace(0)
            signal.signal(signal.SIGTERM, before)

    def ask(self) -> None:
        if self._comm.size > 1:
            self._flag.fill_(int(self._asked.is_set()))
            self._travelling = self._comm.all_reduce(self._flag, "max", async_op=True)

    def was_asked(self) -> bool:
        """Whether any rank had been asked when the step began."""
        if self._comm.size == 1:
            return self._asked.is_set()
        assert self._travelling is not None
        self._travelling.wait()
        return bool(self._flag.item())
