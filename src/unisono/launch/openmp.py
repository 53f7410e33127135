"""OpenMP's threads, which no fork takes along.

Once this process has computed with several threads, GNU's OpenMP keeps them for the next time. A forked child believes
that it has them too, and waits for them for ever at the end of its first parallel loop, however few threads it is told
to use: some libraries (Arm's, in oneDNN) remember the number that they began with. Threads that are let go before the
fork are made anew where they are needed, here and there. Ranks need none: each has a core's share of the machine, and
two ranks whose small products are each shared by two threads take several times as long.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_SOFT = 1  # omp_pause_soft: threads go, settings stay


def release_threads() -> None:
    """Let go of the threads that OpenMP keeps for the calling thread."""
    _tell("omp_pause_resource_all", _SOFT)


def stay_alone() -> None:
    """Have the calling thread run every parallel loop by itself, however many threads a library asks for."""
    _tell("omp_set_max_active_levels", 0)


def _tell(function: str, value: int) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux
        return
    words = (line.split() for line in maps.read_text().splitlines())
    for library in {line[-1] for line in words if len(line) > 5 and Path(line[-1]).name.startswith("libgomp")}:
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(library), function)(value)
