"""What an asynchronous operation returns: something to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Finish = Callable[[], Any]


class Handle:
    """One operation under way, possibly made of several pieces of work.

    The outcome is brought into the caller's tensors exactly once, by whichever of `wait`, a true `is_completed` or the
    future comes first; until then the tensors of the operation must not be read or written.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        finish: Finish,
        waiting: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._works = works
        self._finish = finish
        self._waiting = waiting
        self._lock = threading.Lock()
        self._done = False
        self._result: Any = None

    def wait(self) -> Any:
        """Block until the operation is over; returns its result."""
        if not self._done:
            if self._waiting is None:
                self._wait_for_works()
            else:
                self._waiting(self._wait_for_works)
        return self._complete()

    def is_completed(self) -> bool:
        if not self._done and all(work.is_completed() for work in self._works):
            self._complete()
        return self._done

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with the operation's result, also when nobody waits."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def watch() -> None:
            try:
                future.set_result(self.wait())
            except Exception as error:
                future.set_exception(error)

        if self._done:
            future.set_result(self._result)
        else:
            threading.Thread(target=watch, name="unisono-future", daemon=True).start()
        return future

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()

    def _complete(self) -> Any:
        with self._lock:
            if not self._done:
                self._result = self._finish()
                self._done = True
                self._works = ()
        return self._result
