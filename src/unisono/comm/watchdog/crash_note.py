"""A crash note: a small file with the last operation that a rank began, which other ranks read after it died.

gloo aborts a process that is sent more than it expects, and the kernel kills one when memory runs out: such a rank
cannot report where it was. The file is mapped into memory, so writing it costs no system call. Under a launcher it is
beside the rank's failure record, and the launcher reads and removes it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import socket
import stat
import tempfile
import time
from pathlib import Path
from types import FrameType

import torch

from unisono.comm.watchdog.op_log import P2P, OpLog, describe, frame_location
from unisono.launch.outcome import failure
from unisono.launch.worker import process_tree, stacks

_SIZE = 4096
_PREFIX = "unisono-rank-"
_NAME = re.compile(rf"{_PREFIX}\d+-\w+|unisono-[\w-]+/\w[\w.-]*\.last")  # without a launcher, and with one
_DEAD = ("", "Z", "X")
DIED = "have died"
HALTED = "have been stopped"
BUSY = "busy in native code"
NO_ANSWER = "do not answer (killed, or busy in native code)"
SILENT = (DIED, HALTED)  # of ranks that will not answer
_KEPT = 3600.0  # seconds that the note of a dead rank is kept for others to read


class CrashNote:
    def __init__(self) -> None:
        path = failure.last_operation_path()
        self._is_own = path is None
        if path is None:
            _remove_old()
            handle, name = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-")
            self.path = Path(name)
        else:
            self.path = path
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(handle, _SIZE)
        self._map = mmap.mmap(handle, _SIZE)
        os.close(handle)

    def write(self, log: OpLog, op: str, detail: str, tensor: torch.Tensor | None, frame: FrameType) -> None:
        """Note that the last operation entered in `log` is about to begin. Only collectives get their number."""
        what = "" if tensor is None else f" {describe(tensor.shape, tensor.dtype)}"
        shown = (f"{op}({detail})" if detail else op) + ("" if log.is_p2p else f" #{log.entered}")
        is_world = log.group.removesuffix(P2P) == "world"
        group = "" if is_world else f" in the group of ranks {','.join(map(str, log.ranks))}"
        data = f"{shown}{what} at {frame_location(frame)}{group}\n".encode()[-_SIZE:]
        self._map[: len(data)] = data

    def address(self) -> str:
        return address_of(str(self.path))

    def close(self) -> None:
        """The world is left in order: every operation has ended."""
        self._map[:1] = b"\n"
        self.discard()

    def discard(self) -> None:
        """This rank ends. Under a launcher the file stays for it to read."""
        if self._is_own:
            self.path.unlink(missing_ok=True)


def address_of(path: str = "") -> str:
    """For other ranks of this host: which process this is, and where in the folder for temporary files its note is."""
    return json.dumps([_host(), os.getpid(), os.path.relpath(path, tempfile.gettempdir()) if path else ""])


def fate(address: str) -> str | None:
    """What became of the rank with that address, as a report phrases it; None from another host."""
    try:
        host, pid, name = json.loads(address)
    except ValueError:  # not written by a rank
        return None
    if host != _host() or not isinstance(pid, int) or not isinstance(name, str):
        return None
    operation = _read(name)
    last = f"; last began {operation}" if operation else ""
    state = process_tree.state(pid)
    if state in _DEAD:
        return f"{DIED}{last}"
    if state in process_tree.STOPPED:
        return f"{HALTED} (by SIGSTOP, or in a debugger){last}"
    return f"do not answer ({BUSY}){last}"


def stack(address: str) -> list[stacks.Frame]:
    """The Python stack of the rank with that address, which may be in native code; empty where it cannot be had."""
    with contextlib.suppress(ValueError, TypeError):
        host, pid, _ = json.loads(address)
        if host == _host() and (process := stacks.rank_of(int(pid))) is not None:
            return process.stack(1.0)
    return []


def _read(name: str) -> str:
    """The operation in a rank's note, "" if there is none.

    The name comes from the store, to which others may write: only notes are opened, and no link of any kind."""
    if not _NAME.fullmatch(name):
        return ""
    path = Path(tempfile.gettempdir()) / name
    try:
        if path.parent.is_symlink():
            return ""
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with open(handle, "rb") as note:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.getuid():
            return ""
        return failure.last_operation_in(note.read(_SIZE))


def _remove_old() -> None:
    """Remove notes of ranks that were killed a while ago."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and process_tree.state(int(pid)) in _DEAD and time.time() - path.stat().st_mtime > _KEPT:
                path.unlink()


def _host() -> str:
    """The machine and the PID namespace: process ids of another container mean nothing here."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
