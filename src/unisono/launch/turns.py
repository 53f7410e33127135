"""Whether threads that are woken interrupt those that run.

Note: why ranks do not want it. A rank that sends through gloo holds the lock of a line. The answer wakes gloo's own
thread, which by default interrupts the rank on its core, finds the lock taken, and asks for it again and again, until
the next tick of the clock gives the core back to the rank: up to four milliseconds for a message of a tenth of one.
Linux's policy for batch work has the same share of the cores, but waits for its turn. Threads inherit it.
"""

from __future__ import annotations

import contextlib
import os


def give_way() -> bool:
    """From now on this thread, and those that it starts, wait for their turn when woken; whether that is new."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            return True
    return False


def take_back() -> None:
    """This thread interrupts others again."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
