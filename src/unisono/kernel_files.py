"""Functions that numba compiles once and keeps on disk, for every user and on every machine.

numba writes beside the sources or into the user's cache folder, and where it can write to neither it refuses the
function: in a container that runs as a user without a home, for example. There they are kept in a temporary folder of
this user, and where there is none, each process compiles for itself.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba

_njit: Any = numba.njit  # its types know fewer options than it has
_config: Any = numba.config  # and none of its settings


def kept(**options: Any) -> Any:
    """numba.njit, with `cache=True` where there is a folder for it."""

    def compiled(function: Any) -> Any:
        with contextlib.suppress(RuntimeError):  # numba finds no folder
            return _njit(cache=True, **options)(function)
        if (folder := temporary_folder()) is not None:
            with contextlib.suppress(RuntimeError), _kept_in(folder):
                return _njit(cache=True, **options)(function)
        return _njit(**options)(function)

    return compiled


def temporary_folder() -> Path | None:
    """A folder that this user alone can read and write, as numba unpickles what it finds there; None: there is none."""
    try:
        folder = Path(tempfile.gettempdir()) / f"unisono-kernels-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if is_own and os.access(folder, os.W_OK) else None


@contextlib.contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        _config.CACHE_DIR = before
