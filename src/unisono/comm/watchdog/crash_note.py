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
import socket
import tempfile
import time
from pathlib import Path
from types import FrameType

import torch

from unisono.comm.watchdog.op_log import P2P, OpLog, describe, frame_location
from unisono.launch.outcome import failure

_SIZE = 4096
_PREFIX = "unisono-rank-"
_DEAD = ("", "Z", "X")
_STOPPED = ("T", "t")
DIED = "have died"
HALTED = "have been stopped"
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
    """For other ranks of this host: which process this is, and the path of its note, if it has one."""
    return json.dumps([_host(), os.getpid(), path])


def fate(address: str) -> str | None:
    """What became of the rank with that address, as a report phrases it; None from another host."""
    host, pid, path = json.loads(address)
    if host != _host():
        return None
    operation = failure.read_last_operation(Path(path)) if path else ""
    last = f"; last began {operation}" if operation else ""
    state = _state(pid)
    if state in _DEAD:
        return f"{DIED}{last}"
    if state in _STOPPED:
        return f"{HALTED} (by SIGSTOP, or in a debugger){last}"
    return f"do not answer (busy in native code){last}"


def _remove_old() -> None:
    """Remove notes of ranks that were killed a while ago."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and _state(int(pid)) in _DEAD and time.time() - path.stat().st_mtime > _KEPT:
                path.unlink()


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _host() -> str:
    """The machine and the PID namespace: process ids of another container mean nothing here."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
