"""Threads of a rank's process: reading another thread's stack, what a fork leaves behind, and the scheduling policy.

`frames_of` is for watchdogs, `release_openmp_threads` and `run_openmp_serially` surround the forks of `spawn`, and
`use_batch_scheduling` and `gloo_threads_batch_scheduled` set Linux's SCHED_BATCH where ranks share cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

# A forked child has its parent's objects, but not its threads. If a garbage collection in the child destroys a process
# group of the parent's, its destructor joins threads that do not exist: it waits forever, or crashes. So what a child
# inherits is not collected there; this holds for every fork of this process (ranks, reference processes, DataLoaders).
os.register_at_fork(after_in_child=gc.freeze)

_THREADS = Path("/proc/self/task")
_GLOO_THREAD = "gloo_tcp_loop"  # the name that gloo gives its threads
_COLLECTIVES_THREAD = "pt_gloo_runloop"  # and torch to those in which gloo's collectives run
_RUNNING = "R"  # in Linux's table of threads: has a core, or waits for one
_OMP_PAUSE_SOFT = 1  # release the threads, keep the settings


def frames_of(thread: int | None) -> list[FrameType]:
    """Return the frames of the thread with that identity, innermost first; empty if it has ended.

    Up to Python 3.11, creating a frame object may trigger a garbage collection. A finalizer that releases the GIL (that
    of a tensor does) lets the other thread continue, and the frame object then refers to a frame that is gone: the
    process crashes or hangs. Garbage collection is therefore disabled while the frames are collected.
    """
    frames = []
    with _gc_disabled():
        frame = sys._current_frames().get(thread or 0)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    return frames


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    if sys.version_info >= (3, 12) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def release_openmp_threads() -> None:
    """Release the threads that GNU OpenMP keeps for the calling thread; call before a fork.

    A forked child inherits OpenMP's record of its threads but not the threads, and waits for them forever at the end of
    its first parallel loop, whatever number of threads it is configured to use: some libraries (Arm's, in oneDNN)
    remember the number that they started with. Released threads are created again on demand, in parent and child.
    """
    _call_libgomp("omp_pause_resource_all", _OMP_PAUSE_SOFT)


def run_openmp_serially() -> None:
    """Run every parallel loop on the calling thread alone, however many threads a library requests.

    Forked ranks share the cores: two ranks whose small products are each split over two threads take several times as
    long.
    """
    _call_libgomp("omp_set_max_active_levels", 0)


def _call_libgomp(function: str, value: int) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux
        return
    fields = (line.split() for line in maps.read_text().splitlines())
    for library in {line[-1] for line in fields if len(line) > 5 and Path(line[-1]).name.startswith("libgomp")}:
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(library), function)(value)


def use_batch_scheduling() -> None:
    """Set SCHED_BATCH for this thread and those that it starts: a woken thread does not preempt a running one.

    Used where there are more ranks than cores, so that ranks do not preempt each other.
    """
    _set_batch(0)


@contextlib.contextmanager
def gloo_threads_batch_scheduled(backend: str) -> Iterator[None]:
    """Set SCHED_BATCH for the gloo threads that a backend creates in the block.

    A rank that sends through gloo holds the lock of a connection. The answer wakes gloo's own thread, which by default
    preempts the rank on its core, finds the lock taken and spins until the next scheduler tick returns the core to the
    rank: up to four milliseconds for a message of a tenth of one. With SCHED_BATCH it waits until the rank yields.

    Before torch 2.13 gloo's threads have the name of the thread that creates them.
    """
    before = {thread.name for thread in _THREADS.glob("*")}
    yield
    if backend == "mpi":
        return
    for name in (_GLOO_THREAD, _name_of(_THREADS / str(threading.get_native_id()))):
        for thread in _threads_named(name):
            if thread.name not in before:
                _set_batch(int(thread.name))


def await_collectives_threads(seconds: float = 1.0) -> bool:
    """Wait until none of torch's threads for gloo's collectives is running; call before the interpreter ends.

    Such a thread tells that a collective is done before it lets go of its tensors, and for that it may need the
    interpreter. One that comes for it when Python is being finalized is ended within a C++ destructor, which aborts
    the process ("terminate called without an active exception").
    """
    deadline = time.monotonic() + seconds
    while any(_state(thread) == _RUNNING for thread in _threads_named(_COLLECTIVES_THREAD)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _threads_named(name: str) -> Iterator[Path]:
    yield from (thread for thread in _THREADS.glob("*") if _name_of(thread) == name)


def _name_of(thread: Path) -> str:
    with contextlib.suppress(OSError):  # the thread may have ended
        return (thread / "comm").read_text().strip()
    return ""


def _state(thread: Path) -> str:
    with contextlib.suppress(OSError):
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _set_batch(thread: int) -> None:
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(thread) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
