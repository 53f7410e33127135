"""The agent's side of its connection to the launcher: Reporter sends events, StopListener receives stop requests."""

from __future__ import annotations

import base64
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from unisono.launch.transport.wire import Wire, text_of
from unisono.launch.worker.pool import WorkerPool

HARD_STOP = 4.0  # seconds after a stop request until the agent kills everything and exits
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)  # the last one is sent by StopListener


class Reporter:
    """Events that an agent sends to its launcher while ranks run."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._refused = 0

    def refused(self, count: int, first: str) -> None:
        """Report connections of others to the job's store: the first at once, the number of all at the end."""
        if count and not self._refused:
            self._wire.send({"event": "refused", "from": first})
        self._refused = count

    def output(self, rank: int, stream: str, data: bytes) -> None:
        text = base64.b64encode(data).decode() if stream == "result" else text_of(data)
        self._wire.send({"event": "output", "rank": rank, "stream": stream, "data": text})

    def started(self, attempt: int) -> None:
        self._wire.send({"event": "started", "attempt": attempt})

    def failed(self, pool: WorkerPool, attempt: int, restarting: bool) -> None:
        """Report at once which ranks failed, so that output of the others can be muted; then, settled, why."""
        last = list(pool.last_operations().items())
        pool.pump(0)
        failed = [each.rank for each in pool.failures() if not each.is_consequence]
        if failed:
            self._wire.send({"event": "failing", "ranks": failed})
        failures = [each.to_json() for each in pool.settled_failures()]
        event = {"event": "failed", "failures": failures, "attempt": attempt, "restarting": restarting, "last": last}
        self._wire.send(event)

    def ended(self, codes: dict[int, int | None], problem: str | None, stopped: tuple[int, str, bool] | None) -> bool:
        """stopped: the exit code and the reason of a job that was asked to stop, other than by its launcher, and
        whether ranks of other agents would wait for these in vain. False where the launcher has gone."""
        event = {"event": "ended", "codes": list(codes.items()), "problem": problem, "stopped": stopped}
        return self._wire.send({**event, "refused": self._refused})


class Stopped(BaseException):
    """The launcher, or a signal, ends the job: raised anywhere, also where errors are of no interest."""


class StopListener:
    """Reads the wire in a thread while ranks run: a stop message, or the end of the connection, stops the job.

    The thread interrupts the main thread by SIGUSR1, whose handler raises Stopped there. If the main thread has not
    finished after HARD_STOP seconds, the thread kills all ranks and exits the process.
    """

    def __init__(self, wire: Wire, pool: WorkerPool) -> None:
        self._wire = wire
        self._pool = pool
        self._closed = False
        self._grace = 0.0
        self._keepalive: float | None = None  # seconds without a message of the launcher after which the job is over
        self._is_gentle = False  # by SIGTERM or SIGHUP, or a signal to this agent: ranks get their grace period
        self.keeps_memory = False  # what ranks have saved in memory is for the agents that follow
        self.signal = signal.SIGTERM
        self.received: signal.Signals | None = None  # by this process, and not through the launcher
        self.on_stop: Callable[[signal.Signals], None] | None = None
        for signum in _SIGNALS:
            signal.signal(signum, self._interrupt)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while not self._wire.closed:
            if self._wire.is_silent(self._keepalive):
                self._kill()  # the launcher's host or the network is down
            for message in self._wire.read_once():
                if message["do"] == "stop":
                    self.signal = signal.Signals(message["signal"])
                    self._is_gentle = self.signal in (signal.SIGTERM, signal.SIGHUP)
                    self._stop()
                elif message["do"] == "keep":
                    self.keeps_memory = True
                elif message["do"] == "ping":
                    self._wire.send({"event": "pong"})
                elif message["do"] == "keepalive":
                    self._keepalive = message["seconds"]
        self._stop()

    def _stop(self) -> None:
        if self._closed:
            return
        if self.on_stop is not None:
            self.on_stop(self.signal)
        self._grace = self._pool.grace if self._is_gentle else 0.0
        self._wire.send({"event": "grace", "seconds": self._grace})
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(self._grace + HARD_STOP)
        self._kill()

    def _kill(self) -> None:
        if not self._closed:
            self._pool.kill_all()
            os._exit(1)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        _ignore_signals()
        if signum != signal.SIGUSR1:
            self.received = signal.Signals(signum)
            self._is_gentle = True
            self._grace = self._pool.grace
        raise Stopped

    def await_grace(self) -> None:
        """Let ranks that requested a grace period end by themselves, unless the job is to end at once."""
        if self._is_gentle and self._grace:
            self._pool.terminate_gracefully(self._grace)

    def close(self) -> None:
        self._closed = True
        _ignore_signals()


def _ignore_signals() -> None:
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
