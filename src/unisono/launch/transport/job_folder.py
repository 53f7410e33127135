"""The folder of an MPI job on its launcher's host: the job's secret, where its agents meet, what mpiexec writes.

The launcher removes it. Where that was killed, an agent does at its end, or, if all were, the user's next MPI job: as
long as the launcher lives, it holds a lock on the folder, which systemd-tmpfiles heeds, too. An agent's own folder is
made alike, and names the files in memory that go with it. Hosts may share their temporary folder and not their locks:
each removes its own folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from unisono.regular_files import read_text

_PREFIX, _UNNAMED = "unisono-mpi-", ".unisono-"
_HOST, _SHARED_MEMORY = "host", "shared_memory"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LONGEST = 256  # bytes of the name of a host
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
SEGMENT = "/dev/shm/mpich_shm_"  # how the files of the memory begin that MPICH's ranks on a host share


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
    lock = os.open(unnamed, _FOLDER)
    with contextlib.suppress(OSError):  # of a file system without locks; there nobody else removes it
        fcntl.flock(lock, fcntl.LOCK_EX)
        (unnamed / _HOST).write_text(_host())
    return unnamed.rename(unnamed.with_name(unnamed.name.replace(_UNNAMED, prefix, 1))), lock  # not before it is held


def _host() -> str:
    """This host as it runs now, in all of its containers."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def note_shared_memory(folder: Path, paths: Iterable[str]) -> None:
    """Files that ranks share, and that are removed with the folder, should the process be killed that has it."""
    with contextlib.suppress(OSError):  # a full disk
        (folder / _SHARED_MEMORY).write_text("".join(f"{path}\n" for path in paths))


def remove(folder: Path) -> None:
    """Remove a folder whose process has gone."""
    with contextlib.suppress(OSError, ValueError):
        for path in read_text(folder / _SHARED_MEMORY).split():
            if path.startswith(SEGMENT) and "/" not in path.removeprefix(SEGMENT):
                with contextlib.suppress(OSError):
                    os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(pattern: str) -> None:
    """Remove the temporary folders of such names that processes of this user on this host had when they were killed."""
    for folder in Path(tempfile.gettempdir()).glob(pattern):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid():
                _remove_if_abandoned(folder)


def remove_without_launcher(folder: Path, patience: float) -> None:
    """Remove the folder if its launcher has gone, or goes within patience."""
    deadline = time.monotonic() + patience
    while not _remove_if_abandoned(folder) and time.monotonic() < deadline:
        time.sleep(0.05)


def _remove_if_abandoned(folder: Path) -> bool:
    """Whether it is no longer there; True, too, of one that no launcher of this host has made."""
    try:
        if read_text(folder / _HOST, _LONGEST) != _host():
            return True
        lock = os.open(folder, _FOLDER)
    except (OSError, ValueError):
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held
        return False
    finally:
        os.close(lock)
    remove(folder)
    return True
