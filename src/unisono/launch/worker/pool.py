"""WorkerPool: the ranks of one node as child processes. Forks them, forwards their output, detects failures, ends them.

Note: forks and locks. A lock that another thread holds during a fork stays locked in the child forever. The
pool itself uses one thread, but torch's TCPStore has its own, which resolves the name of every peer that connects under
a lock of the C library that each rank needs to connect. So no rank starts before the last one is forked: ranks wait on
a pipe that `release` closes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import selectors
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unisono.launch import environment
from unisono.launch.outcome import failure, verdict
from unisono.launch.outcome.verdict import RankFailure
from unisono.launch.store import secret as job_secret
from unisono.launch.transport import job_folder
from unisono.launch.worker import process_tree, rank_main

GRACE = 2.0  # seconds between the stop signal and SIGKILL
TICK = 0.02  # polling interval for ended ranks that write nothing
_SETTLE = 0.15  # seconds to wait after a failure for ranks that failed at the same time
_SETTLE_PEER = 0.8  # the same while only broken connections are known
_CHUNK = 1 << 16
_RANDOM = 8  # bytes in a folder's name
_FOLDERS = f"unisono-[0-9]*-{'[0-9a-f]' * 2 * _RANDOM}-*"

OutputListener = Callable[[int, str, bytes], None]  # rank, stream ("out", "err" or "result"), data


@dataclass
class Worker:
    rank: int
    pid: int
    record: Path  # of its failure, see outcome.failure
    ended: float | None = None
    code: int | None = None
    open_streams: set[int] = field(default_factory=set)


@functools.cache
def folder_prefix(pid: int) -> str:
    """How the names of temporary folders of this process `pid` begin, and those of no other, also in another container
    with the same /tmp: for whoever sees that it was killed."""
    return f"unisono-{pid}-{secrets.token_hex(_RANDOM)}-"


class WorkerPool:
    """Start ranks, forward their output to a listener, detect failures, stop all."""

    def __init__(
        self, listener: OutputListener, keep: set[int], with_results: bool = False, close: Collection[int] = ()
    ) -> None:
        """Ranks inherit the file descriptors in `keep`; the pipes in `close` stay with this process."""
        self._listener = listener
        self._keep = keep
        self._own = set(close)
        self._streams = ("out", "err", "result") if with_results else ("out", "err")
        job_folder.remove_abandoned(_FOLDERS)
        self._folder, self._lock = job_folder.make(folder_prefix(os.getpid()))
        self._selector = selectors.DefaultSelector()
        self._secret_file: Path | None = None
        self._generation = 0
        self._gate: tuple[int, int] | None = None
        self.workers: dict[int, Worker] = {}

    @property
    def folder(self) -> Path:
        """For this user only, until the pool is closed."""
        return self._folder

    def share_secret(self, secret: bytes) -> None:
        """Ranks find the job's secret in a file in a folder, and both are closed to other users."""
        self._secret_file = job_secret.write(self._folder, secret)

    def start(self, rank: int, variables: Mapping[str, str], body: Callable[[int | None], int]) -> int:
        """Fork a rank. `body` receives the file descriptor for its result and returns the exit code. See `release`."""
        if self._gate is None:
            self._gate = os.pipe()
        gate = self._gate
        record = self._folder / f"{self._generation}.{rank}.json"
        pipes = {name: os.pipe() for name in self._streams}
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads here hold no lock that a rank needs
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ends = {name: pipe[1] for name, pipe in pipes.items()}
                close = (
                    self._own
                    | {key.fd for key in self._selector.get_map().values()}
                    | {fd for pipe in pipes.values() for fd in pipe}
                )
                variables = {**variables, environment.FAILURE_FILE: str(record)}
                if self._secret_file is not None:
                    variables[environment.SECRET_FILE] = str(self._secret_file)
                rank_main.enter(ends, variables, self._keep | {gate[0]}, close | {gate[1]}, parent)
                os.read(gate[0], 1)  # blocks until every copy of the other end is closed
                os.close(gate[0])
                code = body(ends.get("result"))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        worker = Worker(rank, pid, record)
        for name, (reading, writing) in pipes.items():
            os.close(writing)
            os.set_blocking(reading, False)
            self._selector.register(reading, selectors.EVENT_READ, (worker, name))
            worker.open_streams.add(reading)
        self.workers[rank] = worker
        return pid

    def release(self) -> None:
        """Let the forked ranks start."""
        if self._gate is not None:
            for fd in self._gate:
                os.close(fd)
            self._gate = None

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.code is None]

    def pump(self, seconds: float) -> None:
        """Forward output for at most `seconds`; return early when a rank ends."""
        deadline = time.monotonic() + seconds
        while True:
            self._read(min(TICK, max(0.0, deadline - time.monotonic())))
            if self._collect() or time.monotonic() >= deadline:
                return

    def _read(self, timeout: float) -> None:
        if not self._selector.get_map():
            time.sleep(timeout)
            return
        for key, _ in self._selector.select(timeout):
            worker, name = key.data
            data = _read_available(key.fd)
            if data:
                self._listener(worker.rank, name, data)
            elif data is not None:
                self._close(worker, key.fd)

    def _close(self, worker: Worker, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        worker.open_streams.discard(fd)

    def _collect(self) -> bool:
        ended = False
        for worker in self.running:
            try:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
            except ChildProcessError:  # other code in this process has waited for it
                pid, status = worker.pid, 1 << 8
            if pid:
                worker.code, worker.ended = os.waitstatus_to_exitcode(status), time.time()
                ended = True
        return ended

    def drain(self, timeout: float = 0.5) -> None:
        """Read what ended ranks left in their pipes; with a timeout, since a descendant may keep one open."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not any(worker.code is not None and worker.open_streams for worker in self.workers.values()):
                return
            self._read(TICK)

    def failures(self) -> list[RankFailure]:
        """Ranks that have failed: by exit code or signal, or by a failure record while they are still ending."""
        found = []
        for worker in self.workers.values():
            recorded = failure.read(worker.record)
            if not worker.code and (recorded is None or recorded.kind == failure.PEER):
                continue  # running, or ended with code 0
            found.append(_classify(worker, recorded))
        return found

    def last_operations(self) -> dict[int, str]:
        """The last operation of each rank that keeps a note of it."""
        notes = {rank: failure.last_operation_of(worker.record) for rank, worker in self.workers.items()}
        return {rank: operation for rank, note in notes.items() if (operation := failure.read_last_operation(note))}

    def settled_failures(self) -> list[RankFailure]:
        """As failures(), after waiting for others that failed at the same time."""
        found = self.failures()
        start = time.monotonic()
        while found:
            limit = _SETTLE_PEER if all(each.is_consequence for each in found) else _SETTLE
            if time.monotonic() - start >= limit:
                break
            self.pump(TICK)
            found = self.failures()
        return found

    def stop_note(self) -> tuple[int, str] | None:
        """(exit code, what it has done) of the first rank that was asked to stop and ended before its work was done."""
        notes = (failure.read_stop(worker.record) for worker in self.workers.values())
        return next((noted for noted in notes if noted is not None), None)

    @property
    def grace(self) -> float:
        """The longest grace period after SIGTERM that a running rank has requested."""
        return max((failure.read_grace(worker.record) for worker in self.running), default=0.0)

    def terminate_gracefully(self, limit: float) -> None:
        """Send SIGTERM to every rank, but not to its children, and wait up to `limit` seconds for it to end."""
        for worker in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGTERM)
        deadline = time.monotonic() + limit
        while self.running and not self.failures() and time.monotonic() < deadline:
            self.pump(TICK)

    def stop(self, signum: int = signal.SIGTERM, grace: float = GRACE) -> None:
        """End every rank and its descendants: by `signum`, and by SIGKILL after `grace` seconds."""
        self._signal(signum)
        self._signal(signal.SIGCONT)  # a stopped process handles the signal only when it continues
        self._await_end(grace)
        self._signal(signal.SIGKILL)
        self._await_end(grace)
        self.drain()

    def _await_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            self.pump(TICK)

    def _signal(self, signum: int) -> None:
        """Signal each rank's process group, which may still hold children of an ended rank."""
        for worker in self.workers.values():
            for send, target in ((os.killpg, worker.pid), (os.kill, worker.pid)):
                if send is os.kill and worker.code is not None:
                    continue  # the pid may have been reused
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(target, signum)
                    break

    def clear(self) -> None:
        """Forget the ended ranks, before the next start."""
        self.release()
        for worker in self.workers.values():
            for fd in list(worker.open_streams):
                self._close(worker, fd)
        self.workers.clear()
        self._generation += 1

    def close(self) -> None:
        self.clear()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def kill_all(self) -> None:
        """SIGKILL to everything, at once; may be called from any thread."""
        self._signal(signal.SIGKILL)
        process_tree.sweep(os.getpid())


def _read_available(fd: int) -> bytes | None:
    """b"" at the end of the stream, None when nothing is available."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _classify(worker: Worker, recorded: failure.Failure | None) -> RankFailure:
    if recorded is not None:
        code = recorded.code if worker.code is None else worker.code
        if recorded.kind == failure.HANG:  # whether or not it has ended yet
            code = failure.HANG_CODE
        return RankFailure(worker.rank, recorded.kind, recorded.text, time.time() - recorded.when, code)
    assert worker.code is not None
    assert worker.ended is not None
    kind = verdict.SIGNAL if worker.code < 0 else verdict.EXIT
    return RankFailure(worker.rank, kind, "", time.time() - worker.ended, worker.code)
