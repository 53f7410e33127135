"""Process trees on Linux, so that no process outlives its job: end with a parent, adopt orphans, kill descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send signum to this process when `parent` ends; immediately if it already has."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def outlive_parent() -> None:
    """No longer die_with_parent."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that sweep() finds it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


STOPPED = ("T", "t")  # by a signal, or in a debugger


def state(pid: int) -> str:
    """The kernel's letter for the state of a process; "" where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def hide_argument(argument: str, shown: str) -> None:
    """Show other users' `ps` the start of an argument of this process only: the rest is overwritten where it lies."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        first, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
        with open("/proc/self/cmdline", "rb") as line:
            words = line.read()
        wanted = os.fsencode(argument)
        at = words.find(wanted + b"\0")
        if first and at >= 0 and len(words) <= end - first:
            rest = len(wanted) - len(os.fsencode(shown))
            ctypes.memset(first + at + len(wanted) - rest, ord("*"), rest)


def descendants(root: int) -> list[int]:
    """All living processes below root (zombies left out)."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def ancestors(pid: int) -> list[int]:
    """Its parent, the parent of that, and so on."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        while pid > 1:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                pid = int(stat.read().rpartition(b")")[2].split()[1])
            found.append(pid)
    return found


def sweep(root: int, timeout: float = 2.0) -> None:
    """Kill everything below root. New children that appear meanwhile are killed too."""
    end = time.monotonic() + timeout
    while (found := descendants(root)) and time.monotonic() < end:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)
    reap()


def reap() -> None:
    """Collect ended children that nobody waits for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
