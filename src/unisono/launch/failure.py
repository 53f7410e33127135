"""Why a rank failed, as the rank itself tells the launcher.

A rank that fails writes one small JSON file; the launcher reads the files of all ranks and shows the first
failure alone. The first record of a rank wins, because what follows it is mostly debris.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.launch import environment

EXCEPTION = "exception"  # the script raised
USAGE = "usage"  # the script used something wrongly: a restart would meet the same
HANG = "hang"  # the watch stopped the job; the text is its report
HANG_CODE = 75  # with which a rank ends that the watch stopped
PEER = "peer"  # stopped because another rank failed: never worth showing


@dataclass(frozen=True)
class Failure:
    rank: int
    kind: str
    text: str
    when: float

    @classmethod
    def now(cls, rank: int, kind: str, text: str) -> Failure:
        return cls(rank, kind, text, time.time())


def record(failure: Failure) -> bool:
    """Tell the launcher, if there is one. True when the record was taken (it is the rank's first)."""
    path = os.environ.get(environment.FAILURE_FILE)
    if not path:
        return False
    aside = f"{path}.{os.getpid()}"
    Path(aside).write_text(json.dumps(asdict(failure)))
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(aside)
    return True


def last_words_path() -> Path | None:
    """Where this rank may write what it does last, for the launcher to read if it dies; None without a launcher."""
    path = os.environ.get(environment.FAILURE_FILE)
    return Path(f"{path}.last") if path else None


def read_last_words(path: Path) -> str:
    """The first line of the file, without its end; "" where there is none."""
    try:
        return path.read_bytes().partition(b"\n")[0].strip(b"\0").decode(errors="replace")
    except OSError:
        return ""


def read(path: Path) -> Failure | None:
    """What the rank wrote, or None when it wrote nothing."""
    try:
        return Failure(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
