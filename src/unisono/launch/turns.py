"""Whether threads that are woken interrupt those that run.

Note: why gloo's should not. A rank that sends through gloo holds the lock of a line. The answer wakes gloo's own
thread, which by default interrupts the rank on its core, finds the lock taken, and asks for it again and again, until
the next tick of the clock gives the core back to the rank: up to four milliseconds for a message of a tenth of one.
Linux's policy for batch work has the same share of the cores, but waits for its turn. Ranks themselves keep the default
policy, by which they interrupt other programs, unless they are more than the cores and would interrupt each other.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_GLOO = "gloo_tcp_loop"  # as gloo calls its threads


def give_way() -> None:
    """From now on this thread, and those that it starts, wait for their turn when they are woken."""
    _wait_for_turns(0)


def let_gloo_give_way() -> None:
    """All threads of gloo's that this process has by now wait for their turn when they are woken."""
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it may have ended
            if (thread / "comm").read_text().strip() == _GLOO:
                _wait_for_turns(int(thread.name))


def _wait_for_turns(thread: int) -> None:
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(thread) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
