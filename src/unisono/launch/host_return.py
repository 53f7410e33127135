"""Lost hosts that come back: while an elastic job runs on the others, its launcher asks them now and then.

A host is back when an agent starts there and finds the program. It is first asked one host timeout after it was lost,
and each time that it is lost again it is left alone for twice as long: taking it back restarts the job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from unisono.errors import PreflightError
from unisono.launch.hosts import Placement
from unisono.launch.job import LaunchJob
from unisono.launch.transport import preflight, ssh
from unisono.launch.transport.link import AgentLinks

_LONGEST_FACTOR = 64  # of the host timeout, for a host that is lost again and again


class ReturningHosts:
    """The hosts of a job that are lost, and which of them are back."""

    def __init__(self, job: LaunchJob) -> None:
        self._job = job
        self._losses: dict[str, int] = {}
        self._due: dict[str, float] = {}  # by lost host: when to ask it
        self._back: list[str] = []

    def lose(self, names: Collection[str]) -> None:
        for name in names:
            losses = self._losses[name] = self._losses.get(name, 0) + 1
            self._due[name] = time.monotonic() + self._pause(losses)

    def take(self) -> list[str]:
        """The hosts that are back; they are lost no more."""
        back, self._back = self._back, []
        for name in back:
            del self._due[name]
        return back

    @contextlib.contextmanager
    def asked(self) -> Iterator[Callable[[], bool]]:
        """In the block, lost hosts are asked; whether one is back."""
        done = threading.Event()
        asker = threading.Thread(target=self._ask, args=(done,), daemon=True)
        if self._due:
            asker.start()
        try:
            yield lambda: bool(self._back)
        finally:
            done.set()

    def _ask(self, done: threading.Event) -> None:
        while not done.wait(0.5):
            due = [name for name, when in self._due.items() if when <= time.monotonic()]
            back = [name for name in due if self._answers(name)]
            if back and not done.is_set():
                self._back = back
                return
            for name in due:
                self._due[name] = time.monotonic() + self._pause(self._losses[name])

    def _answers(self, name: str) -> bool:
        host = next(host for host in self._job.hosts if host.name == name)
        links = AgentLinks()
        try:
            alone = replace(self._job, placements=(Placement(host, 0, 1),), verbose=False)
            preflight.gather(alone, links, lambda text: None)
            return True
        except PreflightError:
            return False
        finally:
            links.close_sending()
            links.kill()
            links.close()

    def _pause(self, losses: int) -> float:
        return float(ssh.host_timeout() * min(2 ** (losses - 1), _LONGEST_FACTOR))
