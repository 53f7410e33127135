"""FolderLock: one job writes to a folder. Two would go on from each other's checkpoints.

    run.lock          held by rank 0 as long as the job writes: which process, on which host, and a token

The system releases the lock with the process, however it ends. It is that of an open file: one of a process would be
lost as soon as anything in it has read the file. A lock can be lost all the same: its file is replaced, or the file
system has no locks. So before each save rank 0 looks whether the file is still its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import struct
import time
import weakref
from pathlib import Path
from typing import Any

from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.launch import environment
from unisono.regular_files import read_text

NAME = "run.lock"
CHECKPOINTS, BEST = "checkpoints", "best"  # folders of a run folder
_SOON = 3.0  # seconds in which a process that was just killed gives its lock back
_LATE = 90.0  # in a restart, where it may have been on a host that was lost
_LONGEST = 4096  # bytes that are read of the file
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_EXCLUSIVE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock: all of the file

_held: weakref.WeakValueDictionary[tuple[int, str], _File] = weakref.WeakValueDictionary()  # by process and path


class FolderLock:
    """The lock of a job on a folder. Every rank makes it, and every rank gets the same UsageError."""

    def __init__(self, folder: Path) -> None:
        self._file: _File | None = None
        _raise_on_all(self._take(folder) if world.rank() == 0 else "")

    def _take(self, folder: Path) -> str:
        """Why it cannot be taken; "" if it was, or if there is no such folder, which a save then reports."""
        if folder.name in (CHECKPOINTS, BEST) and (folder.parent / NAME).exists():
            folder = folder.parent  # a run folder, which `Engine.fit` locks as a whole
        key = os.getpid(), os.path.realpath(folder)
        try:
            held = _held.get(key)
            self._file = _File(folder) if held is None or held.problem() else held
        except _InUse as error:
            return str(error)
        except OSError:
            return ""
        _held[key] = self._file
        return ""

    def require(self) -> None:
        """UsageError on every rank if the folder has become another job's. Every rank calls it."""
        _raise_on_all(self.problem())

    def problem(self) -> str:
        """The error of `require`, without communication; "" on ranks other than the first."""
        return "" if self._file is None else self._file.problem()

    def release(self) -> None:
        self._file = None  # which closes it, unless another part of this process writes there


class _InUse(Exception):
    """Another process has the folder; the message says which."""


class _File:
    """The lock file of this process, open. Its children close it, and so do not inherit the lock."""

    def __init__(self, folder: Path) -> None:
        """_InUse if another process has it; OSError where it cannot be made."""
        self._path = folder / NAME
        is_restart = os.environ.get(environment.ATTEMPT, "0") != "0"
        self._open(time.monotonic() + (_LATE if is_restart else _SOON))

    def _open(self, deadline: float) -> None:
        while True:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(
                self._path, _FLAGS, 0o666
            )  # of a group that has the folder together, if the umask says so
            self.close = weakref.finalize(self, os.close, self._fd)
            is_locked = _lock(self._fd)
            if is_locked and self._is_there():
                break
            if time.monotonic() > deadline:
                owner = self._content()
                self.close()
                if is_locked:
                    raise OSError(errno.ESTALE, "the file system gives another file at each look", str(self._path))
                raise _InUse(
                    f"run folder {self._path.parent} is in use by {owner or 'another process'}: two jobs in one folder "
                    "would go on from each other's checkpoints; give another folder, or wait until that one has ended"
                )
            self.close()
            time.sleep(0.1)
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(self._fd, 0)
            about = f"process {os.getpid()} on host {socket.gethostname()}, since {time.ctime()}"
            os.pwrite(self._fd, f"{about}, token {secrets.token_hex(8)}\n".encode(), 0)
        self._written = self._content()

    def _is_there(self) -> bool:
        """Whether the path still leads to the open file."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        return False

    def _content(self) -> str:
        with contextlib.suppress(OSError):
            return os.pread(self._fd, _LONGEST, 0).decode(errors="replace").strip()
        return ""

    def problem(self) -> str:
        """Why the folder is no longer this job's; "" if it is."""
        try:
            if not self._path.exists():  # removed, and no other job has come
                self.close()
                return self._retaken()
            if self._is_there() and self._content() == self._written and _lock(self._fd):
                return ""
            owner = read_text(self._path, _LONGEST).strip()
        except (OSError, ValueError):
            owner = ""
        return (
            f"run folder {self._path.parent} was taken over by {owner or 'another process'}: its {NAME} is no longer "
            "this job's, which has stopped before it saves there; give each job a folder of its own"
        )

    def _retaken(self) -> str:
        try:
            self._open(time.monotonic())
        except _InUse as error:
            return str(error)
        except OSError:
            return ""  # the save reports it
        return ""


def _close_all() -> None:
    for file in list(_held.values()):
        file.close()


os.register_at_fork(after_in_child=_close_all)


def _lock(fd: int) -> bool:
    """False if another process holds it. True where the file system has no locks: there the file's content tells."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _EXCLUSIVE)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _raise_on_all(problem: str) -> None:
    """UsageError with rank 0's problem, if it has one."""
    found: Any = world.world().broadcast_object(problem, only_data=True) if world.world_size() > 1 else problem
    if found:
        raise UsageError(found)
