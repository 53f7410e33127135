"""Files through which a rank informs its launcher: why it failed, its last operation, its shutdown grace period.

The path of the failure record is in the rank's environment; the other files stand beside it. The first failure record
of a rank wins, because later errors are mostly consequences. `launch.worker.pool` reads these files, and
`launch.outcome.verdict` decides which failure is shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.launch import environment

EXCEPTION = "exception"  # the script raised
USAGE = "usage"  # incorrect use: a restart would fail in the same way
HANG = "hang"  # the watchdog stopped the job; the text is its report
HANG_CODE = 75  # exit code of a rank that the watchdog stopped
RESUMABLE = 75  # exit code of a job that was asked to stop, has saved and can go on: EX_TEMPFAIL, as above
PEER = "peer"  # stopped because another rank failed: never shown as the cause
MAX_GRACE = 600.0  # seconds


@dataclass(frozen=True)
class Failure:
    rank: int
    kind: str
    text: str
    when: float
    code: int = 1  # the exit code of a rank that is still ending

    @classmethod
    def now(cls, rank: int, kind: str, text: str, code: int = 1) -> Failure:
        return cls(rank, kind, text, time.time(), code)


def record(failure: Failure) -> bool:
    """Write the failure record, if a launcher started this rank. True if it is the rank's first."""
    path = _record_path()
    if path is None:
        return False
    temporary = f"{path}.{os.getpid()}"
    Path(temporary).write_text(json.dumps(asdict(failure)))
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True


def read(path: Path) -> Failure | None:
    """Read a failure record; None if the rank wrote none."""
    try:
        return Failure(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def last_operation_path() -> Path | None:
    """Where this rank may note its last operation, for the launcher to show if it dies; None without a launcher."""
    path = _record_path()
    return last_operation_of(path) if path else None


def last_operation_of(record: str | Path) -> Path:
    return Path(f"{record}.last")


def read_last_operation(path: Path) -> str:
    """Read the first line of the note; "" if there is none."""
    try:
        return last_operation_in(path.read_bytes())
    except OSError:
        return ""


def last_operation_in(note: bytes) -> str:
    return note.partition(b"\n")[0].strip(b"\0").decode(errors="replace")


def note_stop(text: str, code: int = RESUMABLE) -> None:
    """Note that this rank was asked to stop and will end before its work is done, and what it has done: the job's exit
    code will be `code`, also where the program goes on and ends without an error. An empty text withdraws it."""
    path = _record_path()
    if path and text:
        Path(f"{path}.stopped").write_text(json.dumps([code, text]))
    elif path:
        Path(f"{path}.stopped").unlink(missing_ok=True)


def read_stop(path: Path) -> tuple[int, str] | None:
    """What the rank with the failure record `path` has noted; None if it was not asked to stop."""
    with contextlib.suppress(OSError, ValueError):
        code, text = json.loads(Path(f"{path}.stopped").read_text())
        return int(code), str(text)
    return None


def request_grace(seconds: float) -> None:
    """Ask for so many seconds between SIGTERM and the end of this rank, e.g. to save a checkpoint; 0 withdraws it.

    Without a request a rank is ended at once. The request has no effect after another rank has failed: this rank would
    wait for that one in vain.
    """
    path = _record_path()
    if path:
        temporary = f"{path}.grace.{os.getpid()}"
        Path(temporary).write_text(f"{min(seconds, MAX_GRACE):g}")
        os.replace(temporary, f"{path}.grace")


def read_grace(path: Path) -> float:
    """Read the grace period that the rank with the failure record `path` requested."""
    with contextlib.suppress(OSError, ValueError):
        return min(float(Path(f"{path}.grace").read_text()), MAX_GRACE)
    return 0.0


def _record_path() -> str | None:
    return os.environ.get(environment.FAILURE_FILE)
