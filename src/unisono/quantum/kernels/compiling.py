"""How kernels are compiled: `entry` for those that Python calls, kept on disk; `inner` for those that kernels call.

numba takes longer to compile the Python and C wrappers of a kernel than many kernels, so each has only those it needs.

Files on disk carry a digest of all kernels' sources, since numba itself checks only the file that defines an entry, and
would use entries that were compiled with other inner kernels. If several processes need a kernel that is not compiled
yet, one compiles it, and the others wait.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numba

from unisono import kernel_files

try:
    import fcntl
except ImportError:  # no such system: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

_njit: Any = numba.njit  # its types know fewer options than it has
_ALL: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def _digest() -> str:
    found = hashlib.blake2b(digest_size=6)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


_SOURCES = _digest()


def entry(*, fastmath: bool = False) -> Any:
    def compiled(function: Any) -> Any:
        function.__qualname__ += f"_{_SOURCES}"  # numba names its files after it
        kernel = kernel_files.kept(**_ALL, fastmath=fastmath)(function)
        cache = getattr(kernel, "_cache", None)
        if fcntl is not None and cache is not None and cache.cache_path is not None:
            kernel._cache = OneCompiles(cache, f"{function.__module__}.{function.__qualname__}")
        return kernel

    return compiled


def inner(*, fastmath: bool = False) -> Any:
    return _njit(**_ALL, no_cpython_wrapper=True, fastmath=fastmath)


class OneCompiles:
    """numba's cache of a kernel, under a lock from where something is missing to where it has been saved."""

    def __init__(self, cache: Any, name: str) -> None:
        self._cache = cache
        self._name = name
        self._file: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *given: Any) -> Any:
        found = self._cache.load_overload(*given)
        if found is None:
            self._lock()
            found = self._cache.load_overload(*given)
            if found is not None:
                self._unlock()
        return found

    def save_overload(self, *given: Any) -> None:
        try:
            self._cache.save_overload(*given)
        finally:
            self._unlock()

    def _lock(self) -> None:
        if self._file is not None:  # a compilation that was interrupted has it still
            return
        path = Path(self._cache.cache_path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path / f"{self._name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            self._unlock()

    def _unlock(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
