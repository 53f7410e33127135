"""What an asynchronous operation returns: something to wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch

Finish = Callable[[], Any]


class Awaited(Protocol):
    """What a Handle needs of torch's Work. Of a mute one, is_completed is not called."""

    def wait(self) -> Any: ...
    def is_completed(self) -> bool: ...


class Leftovers:
    """Messages whose handles were dropped before they were over: gloo sends them only while their work lives.

    A thread, started on first need, waits for them, one after the other.
    """

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[tuple[Sequence[Awaited], Finish]] = SimpleQueue()
        self._unstarted = threading.Lock()

    def take(self, works: Sequence[Awaited], finish: Finish) -> None:
        # May run inside a garbage collection, in any thread: SimpleQueue allows that; no lock is waited for.
        self._arrivals.put((works, finish))
        if self._unstarted.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                threading.Thread(target=self._run, name="unisono-leftovers", daemon=True).start()

    def _run(self) -> None:
        while True:
            works, finish = self._arrivals.get()
            for work in works:
                with contextlib.suppress(RuntimeError):  # its handle is gone
                    work.wait()
            del works, finish


_LEFTOVERS = Leftovers()


class Handle:
    """One operation under way, possibly made of several chunks of work.

    The outcome is brought into the caller's tensors exactly once, by whichever of `wait`, a true `is_completed` or the
    future comes first; until then the tensors of the operation must not be read or written. Of an operation that
    failed, `is_completed` is true as well, and `wait` raises.
    """

    def __init__(
        self,
        works: Sequence[Awaited],
        finish: Finish,
        waiting: Callable[[Callable[[], None]], None] | None = None,
        *,
        is_mute: bool = False,
    ) -> None:
        """`is_mute`: the works do not report that they are over, and can be waited for only once."""
        self._works = works
        self._finish = finish
        self._waiting = waiting
        self._is_mute = is_mute
        self._wait_lock = threading.Lock()  # one thread waits, or finishes, at a time
        self._watcher: torch.futures.Future[Any] | None = None
        self._done = False
        self._error: Exception | None = None
        self._result: Any = None

    def wait(self) -> Any:
        """Block until the operation is over; returns its result."""
        if not self._done:
            with self._wait_lock:
                if not self._done:
                    self._wait()
        return self._result

    def __del__(self) -> None:
        if getattr(self, "_is_mute", False) and self._works and self._error is None:
            _LEFTOVERS.take(self._works, self._finish)

    def is_completed(self) -> bool:
        if self._done or self._error is not None:
            return True
        if self._is_mute:
            self._watcher = self._watcher or self.get_future()
            return self._watcher.done()
        if not all(work.is_completed() for work in self._works):
            return False
        if self._wait_lock.acquire(blocking=False):  # else another thread is about to finish
            try:
                if not self._done:
                    self._wait_for_works()  # they are over: this raises where they failed
                    self._complete()
            except RuntimeError:
                return True  # `wait` raises it
            finally:
                self._wait_lock.release()
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

    def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            if self._waiting is None:
                self._wait_for_works()
            else:
                self._waiting(self._wait_for_works)
            self._complete()
        except Exception as error:
            self._error = error
            raise

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()

    def _complete(self) -> None:
        self._result = self._finish()
        self._done = True
        self._works = ()
