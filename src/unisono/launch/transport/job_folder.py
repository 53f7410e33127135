"""The folder of an MPI job on its launcher's host: the job's secret, where its agents meet, what mpiexec writes.

The launcher removes it. Where that was killed, an agent does at its end, or, if all were, the user's next MPI job: as
long as the launcher lives, it holds a lock on a file in there. An agent's own folder is made alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PREFIX, _UNNAMED = "unisono-mpi-", ".unisono-"
_LOCK = "lock"


@contextlib.contextmanager
def made() -> Iterator[Path]:
    """A new folder for this user only, in the block."""
    remove_abandoned(f"{_PREFIX}*")
    folder, lock = make(_PREFIX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def make(prefix: str) -> tuple[Path, int]:
    """A new temporary folder for this user only, and a descriptor: while it is open, the folder is not abandoned."""
    unnamed = Path(tempfile.mkdtemp(prefix=_UNNAMED))
    lock = os.open(unnamed / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # of a file system without locks; there nobody else removes it
        fcntl.flock(lock, fcntl.LOCK_EX)
    return unnamed.rename(unnamed.with_name(unnamed.name.replace(_UNNAMED, prefix, 1))), lock  # not before it is held


def remove_abandoned(pattern: str, remove: Callable[[Path], None] | None = None) -> None:
    """Remove the temporary folders of such names that processes of this user had when they were killed."""
    for folder in Path(tempfile.gettempdir()).glob(pattern):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid():
                _remove_if_abandoned(folder, remove)


def remove_without_launcher(folder: Path, patience: float) -> None:
    """Remove the folder if its launcher has gone, or goes within patience."""
    deadline = time.monotonic() + patience
    while not _remove_if_abandoned(folder) and time.monotonic() < deadline:
        time.sleep(0.05)


def _remove_if_abandoned(folder: Path, remove: Callable[[Path], None] | None = None) -> bool:
    """Whether it is no longer there; True, too, of one that no launcher of this host has made."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held
        return False
    finally:
        os.close(lock)
    if remove is not None:
        remove(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return True
