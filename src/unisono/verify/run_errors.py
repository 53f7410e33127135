"""Errors of runs without a verdict, in one sentence: a refusal, or an error of the task or the library.

A rank that ends this way writes a file. When all ranks of a plan have been refused, they go on with the next plan;
otherwise the ranks that still run may wait for those that do not, so all are ended, and whoever started them reads the
files.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import nn

from unisono.errors import HangError, TaskError, UnisonoError, UsageError
from unisono.launch.worker.rank_main import is_peer_failure

REFUSAL = "refusal"  # the library refuses the plan, with the reason
FAILURE = "failure"  # an error of any other kind
LOST = "lost"  # what a rank raises when another has died or does not arrive: the launcher has the cause
_LONGEST = 500  # characters of an error's message
_STDLIB = sysconfig.get_paths()["stdlib"]
_FLOAT64 = re.compile(r"\b(Double|ComplexDouble|double|float64|complex128)\b")


_ON_ONE_DEVICE = "the task fails on one device, without any plan: "


class OneDeviceError(UnisonoError, RuntimeError):
    """The plain model fails without any plan; every rank raises it."""


@dataclass(frozen=True)
class RunError:
    kind: str
    text: str
    when: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: Exception) -> RunError:
        if isinstance(error, OneDeviceError | TaskError):
            return cls(FAILURE, _in_one_line(error))
        if isinstance(error, UsageError):
            return cls(REFUSAL, _in_one_line(error))
        is_lost = isinstance(error, HangError) or is_peer_failure(error)
        return cls(LOST if is_lost else FAILURE, described(error))

    @property
    def is_of_float64(self) -> bool:
        """Whether it is an error about float64, such as of a kernel that has none: float32 may do better."""
        return self.kind == FAILURE and _FLOAT64.search(self.text) is not None

    def as_error(self) -> UnisonoError:
        """Of the plain model."""
        if self.kind == REFUSAL:
            return UsageError(self.text)
        return OneDeviceError(_ON_ONE_DEVICE + self.text)


def in_float32(run_error: RunError) -> str:
    """The note of a verdict in float32, where float64 failed with this error."""
    return f"proved in float32, as float64 fails: {run_error.text.removeprefix(_ON_ONE_DEVICE)}"


def described(error: BaseException) -> str:
    """An error's type and message, the module in whose forward it was raised and the line of the user's code."""
    message = _in_one_line(error)
    message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
    reported = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return ", ".join([reported, *filter(None, (_module_of(error), _line_of(error)))])


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _module_of(error: BaseException) -> str:
    """The innermost module that was running, by its name in the outermost."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    running = [owner for owner in owners if isinstance(owner, nn.Module)]
    if not running:
        return ""
    name = next((name for name, module in running[0].named_modules() if module is running[-1]), "")
    kind = type(running[-1]).__name__
    return f"in {name} ({kind})" if name else f"in {kind}"


def _line_of(error: BaseException) -> str:
    """The innermost line that is neither this library's nor an installed package's."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for path, line, *_ in reversed(traceback.extract_tb(error.__traceback__)):
        if not path.startswith((own, _STDLIB, "<")) and "site-packages" not in path and os.path.isfile(path):
            shown = os.path.relpath(path)
            return f"at {path if shown.startswith('..') else shown}:{line}"
    return ""


class RankErrors:
    """The errors of a plan's ranks, in files of a folder that they share."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._number = number

    def note(self, rank: int, run_error: RunError) -> None:
        path = self._folder / f"ended-{self._number}-{rank}"
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(asdict(run_error)))
        aside.rename(path)

    def forget(self) -> None:
        for path in self._folder.glob(f"ended-{self._number}-*"):
            path.unlink(missing_ok=True)

    def known(self) -> dict[int, RunError]:
        """By rank."""
        paths = [path for path in self._folder.glob(f"ended-{self._number}-*") if not path.suffix]
        return {int(path.name.rpartition("-")[2]): RunError(**json.loads(path.read_text())) for path in paths}

    def are_alike(self, run_error: RunError, ranks: int, within: float) -> bool:
        """Whether every rank has ended, in so many seconds, in this way, and none waits for another."""
        deadline = time.monotonic() + within
        while len(known := self.known()) < ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(known) == ranks and {each.kind for each in known.values()} == {run_error.kind}

    def cause(self, ranks: int) -> RunError | None:
        """The one that explains the others: a refusal before an error, then the first; None where none does."""
        found = self.known()
        causes = [(each.kind != REFUSAL, each.when, rank) for rank, each in found.items() if each.kind != LOST]
        if not causes:
            return None
        rank = min(causes)[2]
        run_error = found[rank]
        alike = [other for other in found.values() if other.text == run_error.text]
        if run_error.kind == REFUSAL or len(alike) == ranks:
            return run_error
        return RunError(run_error.kind, f"{run_error.text} (on rank {rank} of {ranks})", run_error.when)
