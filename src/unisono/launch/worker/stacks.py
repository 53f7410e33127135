"""Python stacks of a running rank, for a process of the same user that asks: `unisono attach`.

A rank opens a file beside its failure record and has faulthandler write its stack there at a signal. The handler is
native code: it also answers for a rank that is in an endless loop, or in native code that does not let Python run.
Whoever asks finds the file among the descriptors that the kernel shows of the process, to the same user only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from unisono.launch import environment
from unisono.launch.worker import process_tree
from unisono.regular_files import open_regular, read_json

SIGNAL = signal.SIGRTMAX - 2  # programs and schedulers use the others
_SUFFIX = ".stacks"
_LONGEST = 4096  # bytes of the first line of a rank's file
_QUIET = 0.03  # seconds in which the handler writes no more: it is done
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_THREAD = re.compile(r"(Current thread|Thread) 0x([0-9a-f]+).*:")

_file: TextIO | None = None


# ---- in the rank ---------------------------------------------------------------------------------------------------


def offer() -> None:
    """From here on this rank's stack can be asked for, where a launcher started it."""
    global _file
    record = os.environ.get(environment.FAILURE_FILE)
    if not record:
        return
    _file = open(record + _SUFFIX, "a", encoding="utf-8")  # noqa: SIM115  # as long as the process
    about = {
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "attempt": int(os.environ.get(environment.ATTEMPT, "0")),
        "launcher": int(os.environ.get(environment.LAUNCHER, "0")),
        "pid": os.getpid(),
        "fd": _file.fileno(),
        "thread": threading.main_thread().ident,
    }
    _file.write(json.dumps(about) + "\n")
    _file.flush()
    faulthandler.register(SIGNAL, file=_file, all_threads=True)


def asked() -> int:
    """A number that grows each time that the stack was asked for; 0 where it cannot be."""
    with contextlib.suppress(OSError, ValueError):
        return os.fstat(_file.fileno()).st_size if _file is not None else 0
    return 0


def answer(state: dict[str, Any] | None) -> None:
    """Leave this rank's state for whoever asked. None: nobody has yet, but this rank will answer."""
    if _file is not None:
        path = Path(_file.name).with_suffix(".state")
        temporary = path.with_suffix(f".state-{os.getpid()}")
        temporary.write_text("" if state is None else json.dumps(state))
        temporary.replace(path)


# ---- who asks ------------------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    file: str
    line: int
    function: str


@dataclass(frozen=True)
class RankProcess:
    """A rank that runs on this host."""

    pid: int
    path: Path  # of its stacks
    rank: int
    world: int
    attempt: int
    launcher: int  # its process id on the launcher's host; 0: not known
    thread: int

    @property
    def job(self) -> object:
        """Equal for ranks of one job."""
        return self.launcher or self.path.parent  # of the ranks that one process has forked

    @property
    def is_stopped(self) -> bool:
        return process_tree.state(self.pid) in process_tree.STOPPED

    def stack(self, seconds: float) -> list[Frame]:
        """The main thread's frames, outermost first; empty where there is no answer."""
        return _main_stack(_dump(self.pid, self.path, seconds), self.thread)

    def workers(self, seconds: float) -> Iterator[tuple[int, list[Frame]]]:
        """The same for each process that the rank has forked, such as workers of a DataLoader."""
        for pid in process_tree.descendants(self.pid):
            frames = _main_stack(_dump(pid, self.path, seconds), self.thread) if _catches(pid) else []
            if frames:
                yield pid, frames

    def asked_state(self, since: int, seconds: float) -> dict[str, Any] | None:
        """What the rank's watchdog has answered after `since` (see `state_time`); None where it does not."""
        path = self.path.with_suffix(".state")
        deadline = time.monotonic() + seconds
        while path.exists() and time.monotonic() < deadline:
            if self.state_time != since:
                with contextlib.suppress(OSError, ValueError, TypeError):
                    return dict(read_json(path))
            time.sleep(0.02)
        return None

    @property
    def state_time(self) -> int:
        with contextlib.suppress(OSError):
            return self.path.with_suffix(".state").stat().st_mtime_ns
        return 0


def ranks_here() -> list[RankProcess]:
    """All ranks of this user's on this host, by rank."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = [rank for pid in pids if (rank := rank_of(pid)) is not None]
    return sorted(found, key=lambda each: each.rank)


def rank_of(pid: int) -> RankProcess | None:
    """None for a process that is no rank, or one that a rank has forked."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = Path(os.readlink(f"/proc/{pid}/fd/{name}"))
            if path.suffix == _SUFFIX and path.stat().st_uid == Path(f"/proc/{pid}").stat().st_uid:
                with open_regular(path) as file:
                    about = json.loads(file.readline(_LONGEST))
                if (about["pid"], about["fd"]) == (pid, int(name)):
                    fields = {key: int(about[key]) for key in ("pid", "rank", "world", "attempt", "launcher", "thread")}
                    return RankProcess(path=path, **fields)
    return None


def _catches(pid: int) -> bool:
    """Whether the process handles the signal, which would end any other, and can do so now."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                is_caught = int(line.split()[1], 16) >> (SIGNAL - 1) & 1
                return bool(is_caught) and process_tree.state(pid) not in process_tree.STOPPED
    return False


def _dump(pid: int, path: Path, seconds: float) -> str:
    """What the process writes; "" where it does not, or has ended meanwhile with its job."""
    with contextlib.suppress(OSError):
        return _dumped(pid, path, seconds) if _catches(pid) else ""
    return ""


def _dumped(pid: int, path: Path, seconds: float) -> str:
    before = size = path.stat().st_size
    os.kill(pid, SIGNAL)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_QUIET)
        last, size = size, path.stat().st_size
        if before < size == last:
            break
    with open_regular(path) as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def _main_stack(text: str, thread: int) -> list[Frame]:
    stacks: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            current = stacks.setdefault(int(head[2], 16), [])
        elif frame := _FRAME.match(line):
            current.insert(0, Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return stacks.get(thread, [])
