"""How long a rank wants between SIGTERM and its end: to save what it has done, before a machine is taken away.

A rank that says nothing is ended at once, as any program. One that asks for patience gets it, however the SIGTERM came
to it; not when another rank has failed, for then it would wait for that one in vain.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from unisono.launch import environment

MOST = 600.0  # seconds


def ask(seconds: float) -> None:
    """From now on this rank wants so long; 0 takes it back."""
    record = os.environ.get(environment.FAILURE_FILE)
    if record:
        aside = f"{record}.patience.{os.getpid()}"
        Path(aside).write_text(f"{min(seconds, MOST):g}")
        os.replace(aside, f"{record}.patience")


def of(record: Path) -> float:
    """What the rank with this failure record asked for."""
    with contextlib.suppress(OSError, ValueError):
        return min(float(Path(f"{record}.patience").read_text()), MOST)
    return 0.0
