"""The ranks of one node as child processes: forked, listened to, judged, ended.

Note: forks and locks. What another thread holds at the moment of a fork stays locked in the child for ever. One thread
does everything here; but torch's store has one of its own, which looks up the name of whoever connects, under a lock of
the C library's that every rank needs to connect in its turn. So no rank begins before the last one is forked: they wait
at a gate, which `release` opens.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unisono.launch import environment, failure, patience, proctree, rank, verdict
from unisono.launch.verdict import RankFailure

GRACE = 2.0  # seconds between asking a rank to end and killing it
TICK = 0.02  # how often ended ranks are looked for when they write nothing
_SETTLE = 0.15  # after a failure, how long others that failed at the same time may still be noticed
_SETTLE_DEBRIS = 0.8  # the same while only broken connections are known
_CHUNK = 1 << 16

Listener = Callable[[int, str, bytes], None]  # rank, stream ("out", "err" or "result"), data


@dataclass
class Member:
    rank: int
    pid: int
    record: Path
    ended: float | None = None
    code: int | None = None
    open_streams: set[int] = field(default_factory=set)


class Crew:
    """Start ranks, pump their output to a listener, find the failed, end them all."""

    def __init__(
        self, listener: Listener, keep: set[int], with_results: bool = False, close: Collection[int] = ()
    ) -> None:
        """Of the descriptors open here, ranks have those to `keep`; pipes to `close` are this process's alone."""
        self._listener = listener
        self._keep = keep
        self._own = set(close)
        self._names = ("out", "err", "result") if with_results else ("out", "err")
        self._folder = Path(tempfile.mkdtemp(prefix="unisono-"))
        self._selector = selectors.DefaultSelector()
        self._generation = 0
        self._gate: tuple[int, int] | None = None
        self.members: dict[int, Member] = {}

    def start(self, number: int, variables: Mapping[str, str], body: Callable[[int | None], int]) -> int:
        """Fork rank `number`. body gets the descriptor for its result and returns the exit code. See `release`."""
        if self._gate is None:
            self._gate = os.pipe()
        gate = self._gate
        record = self._folder / f"{self._generation}.{number}.json"
        pipes = {name: os.pipe() for name in self._names}
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
                rank.enter(ends, variables, self._keep | {gate[0]}, close | {gate[1]}, parent)
                os.read(gate[0], 1)  # until nobody holds the other end
                os.close(gate[0])
                code = body(ends.get("result"))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        member = Member(number, pid, record)
        for name, (reading, writing) in pipes.items():
            os.close(writing)
            os.set_blocking(reading, False)
            self._selector.register(reading, selectors.EVENT_READ, (member, name))
            member.open_streams.add(reading)
        self.members[number] = member
        return pid

    def release(self) -> None:
        """All ranks are forked and may begin."""
        if self._gate is not None:
            for fd in self._gate:
                os.close(fd)
            self._gate = None

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members.values() if member.code is None]

    def pump(self, seconds: float) -> None:
        """Pass output on for at most `seconds`; returns early when a rank ends."""
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
            member, name = key.data
            data = _read_some(key.fd)
            if data:
                self._listener(member.rank, name, data)
            elif data is not None:
                self._close(member, key.fd)

    def _close(self, member: Member, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        member.open_streams.discard(fd)

    def _collect(self) -> bool:
        ended = False
        for member in self.running:
            try:
                pid, status = os.waitpid(member.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else in this process waited for it
                pid, status = member.pid, 1 << 8
            if pid:
                member.code, member.ended = os.waitstatus_to_exitcode(status), time.time()
                ended = True
        return ended

    def drain(self, patience: float = 0.5) -> None:
        """Read what ended ranks left in their pipes; not for long, since a descendant may hold one open."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            waiting = [m for m in self.members.values() if m.code is not None and m.open_streams]
            if not waiting:
                return
            self._read(TICK)

    def failures(self) -> list[RankFailure]:
        """The ranks that failed so far: by exit code or signal, or by their own word while still ending."""
        found = []
        for member in self.members.values():
            told = failure.read(member.record)
            if not member.code and (told is None or told.kind == failure.PEER):
                continue  # still running, or ended well
            found.append(_judge(member, told))
        return found

    def last_words(self) -> dict[int, str]:
        """What each rank began last, of those that keep a record of it."""
        told = {rank: failure.read_last_words(_last_words(member)) for rank, member in self.members.items()}
        return {rank: words for rank, words in told.items() if words}

    def settled_failures(self) -> list[RankFailure]:
        """As failures(), after giving others that failed at the same moment time to be noticed."""
        found = self.failures()
        start = time.monotonic()
        while found:
            limit = _SETTLE_DEBRIS if all(each.is_debris for each in found) else _SETTLE
            if time.monotonic() - start >= limit:
                break
            self.pump(TICK)
            found = self.failures()
        return found

    @property
    def patience(self) -> float:
        """The longest time that a running rank wants to have after SIGTERM."""
        return max((patience.of(member.record) for member in self.running), default=0.0)

    def leave_in_peace(self, limit: float) -> None:
        """Ask every rank to end, alone and not what it started, and give it `limit` seconds to do so by itself."""
        for member in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGTERM)
        deadline = time.monotonic() + limit
        while self.running and not self.failures() and time.monotonic() < deadline:
            self.pump(TICK)

    def stop(self, signum: int = signal.SIGTERM, grace: float = GRACE) -> None:
        """End every rank and everything it started; first politely."""
        self._signal(signum)
        self._signal(signal.SIGCONT)  # one that was halted learns of it only when it goes on
        deadline = time.monotonic() + grace
        while self.running and time.monotonic() < deadline:
            self.pump(TICK)
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + grace
        while self.running and time.monotonic() < deadline:
            self.pump(TICK)
        self.drain()

    def _signal(self, signum: int) -> None:
        """To the rank and its process group. An ended rank's group may still hold its children."""
        for member in self.members.values():
            for send, target in ((os.killpg, member.pid), (os.kill, member.pid)):
                if send is os.kill and member.code is not None:
                    continue  # its number may be another process's by now
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(target, signum)
                    break

    def clear(self) -> None:
        """Forget ended ranks, before the next start."""
        self.release()
        for member in self.members.values():
            for fd in list(member.open_streams):
                self._close(member, fd)
        self.members.clear()
        self._generation += 1

    def close(self) -> None:
        self.clear()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill_all(self) -> None:
        """At once, from any thread, without listening."""
        self._signal(signal.SIGKILL)
        proctree.sweep(os.getpid())


def _read_some(fd: int) -> bytes | None:
    """b"" at the end of the stream, None when there is nothing yet."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _last_words(member: Member) -> Path:
    return Path(f"{member.record}.last")


def _judge(member: Member, told: failure.Failure | None) -> RankFailure:
    code = 1 if member.code is None else member.code
    if told is not None:
        if told.kind == failure.HANG:  # whether or not it has come to its end
            code = failure.HANG_CODE
        return RankFailure(member.rank, told.kind, told.text, time.time() - told.when, code)
    assert member.ended is not None
    kind = verdict.SIGNAL if code < 0 else verdict.EXIT
    return RankFailure(member.rank, kind, "", time.time() - member.ended, code)
