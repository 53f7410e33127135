"""A rank's black box: a small file with the last operation that it began, to be read after a crash.

gloo aborts a process that is sent more than it expects, and the kernel kills one when memory runs out: such a rank can
no longer say where it was. The file is mapped into memory, so that writing it costs no call to the kernel. It lies
beside the rank's failure record when a launcher is there, which reads it and clears it away.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import tempfile
import time
from pathlib import Path
from types import CodeType, FrameType

import torch

from unisono.comm.log import MESSAGES, Log, describe, described_call, frame_place, place
from unisono.launch import failure

_SIZE = 4096
_PREFIX = "unisono-rank-"
_DEAD = ("", "Z", "X")
_STOPPED = ("T", "t")
DIED = "have died"
HALTED = "have been stopped"
SILENT = (DIED, HALTED)  # of ranks that will not answer
_MOURNED = 60.0  # seconds that a dead rank's box is left, once a rank of another job has come by


class BlackBox:
    def __init__(self) -> None:
        path = failure.last_words_path()
        self._is_own = path is None
        if path is None:
            _clear_away_old()
            handle, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-")
            self.path = Path(name)
        else:
            self.path = path
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(handle, _SIZE)
        self._map = mmap.mmap(handle, _SIZE)
        os.close(handle)
        self._files: dict[CodeType, str] = {}

    def write(self, log: Log, op: str, detail: str, tensor: torch.Tensor | None, code: CodeType, line: int) -> None:
        """Note that the next operation of the log's group is about to begin."""
        file = self._files.get(code)
        if file is None:
            file = self._files[code] = place(code, 0)[:-2]
        what = described_call(op, detail, log.count + 1, tensor)
        self._put(what, log, f"{file}:{line}")

    def write_message(self, log: Log, op: str, tensor: torch.Tensor | None, frame: FrameType) -> None:
        """Note that a message is about to be sent or expected."""
        what = "" if tensor is None else f" {describe(tensor.shape, tensor.dtype)}"
        self._put(f"{op}{what}", log, frame_place(frame))

    def _put(self, what: str, log: Log, where: str) -> None:
        is_world = log.group.removesuffix(MESSAGES) == "world"
        group = "" if is_world else f" in the group of ranks {','.join(map(str, log.ranks))}"
        data = f"{what} at {where}{group}\n".encode()[-_SIZE:]
        self._map[: len(data)] = data

    def address(self) -> str:
        """For other ranks of this host: where the box lies, and whose it is."""
        return address_of(str(self.path))

    def close(self) -> None:
        """The world is left in order: what was begun has ended."""
        self._map[:1] = b"\n"
        self.discard()

    def discard(self) -> None:
        """This rank ends. A launcher may still read the box, and clears it away itself."""
        if self._is_own:
            self.path.unlink(missing_ok=True)


def address_of(path: str = "") -> str:
    """For other ranks of this host: which process this is, and where its box lies, if it has one."""
    return json.dumps([_host(), os.getpid(), path])


def fate(address: str) -> str | None:
    """What became of the rank that is there, as a report says it; None from another host."""
    host, pid, path = json.loads(address)
    if host != _host():
        return None
    words = failure.read_last_words(Path(path)) if path else ""
    last = f"; last began {words}" if words else ""
    state = _state(pid)
    if state in _DEAD:
        return f"{DIED}{last}"
    if state in _STOPPED:
        return f"{HALTED} (by SIGSTOP, or in a debugger){last}"
    return f"do not answer (busy in native code){last}"


def _clear_away_old() -> None:
    """Boxes of ranks that were killed and of which nobody asked. Ranks of other jobs may be about to: who finds one
    first leaves the hour in its times, who finds it later clears it away."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            with contextlib.suppress(OSError):
                found = path.stat()
                if found.st_atime != 0:
                    os.utime(path, (0, time.time()))
                elif time.time() - found.st_mtime > _MOURNED:
                    path.unlink()


def _is_alive(pid: int) -> bool:
    return _state(pid) not in _DEAD


def _state(pid: int) -> str:
    """The letter that the kernel has for what a process does; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _host() -> str:
    """This machine and this view of its processes: process numbers of another container mean nothing here."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
