"""The folder of a run, which `unisono report` reads.

run.json          model, plan and time; one entry for each start
steps.jsonl       one line for each step
ranks/N.json      profile and program of one step on rank N, written at the end
program.html      the program of a step beside that of one device
tensorboard/      the numbers of steps.jsonl, if tensorboard is installed (loggers.py)
profile/          traces of torch's profiler, with fit(profile_steps=...)
checkpoints/      see train/checkpoint/
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from unisono.errors import UnisonoError, UsageError
from unisono.train.callbacks import Callback, StepInfo

if TYPE_CHECKING:
    from unisono.train.engine import Engine


class RunFolder(Callback):
    """Rank 0 writes the numbers of the run; every rank its own file at the end."""

    def __init__(self, path: str | Path, rank: int) -> None:
        self.path = Path(path)
        self._rank = rank
        self._lines: TextIO | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def open(self, about: dict[str, Any], first_step: int) -> None:
        """Create the folder, or continue in it; UsageError if another model was trained there."""
        try:
            (self.path / "ranks").mkdir(parents=True, exist_ok=True)
            if self._rank == 0:
                self._begin(about, first_step)
        except OSError as error:
            raise UsageError(f"run folder {self.path}: cannot be created: {error.strerror}; use another path") from None

    def _begin(self, about: dict[str, Any], first_step: int) -> None:
        starts = self.starts(self.path)
        if starts and starts[-1]["model"] != about["model"]:
            raise UsageError(
                f"run folder {self.path} belongs to another model: {_shown(starts[-1]['model'])} was trained there, "
                f"this is {_shown(about['model'])}; give another folder"
            )
        self._drop_after(first_step)
        starts.append({**about, "first_step": first_step, "time": time.time()})
        _write(self.path / "run.json", {"starts": starts})
        self._lines = open(self.path / "steps.jsonl", "a", encoding="utf-8")  # noqa: SIM115  # open for the run

    @staticmethod
    def starts(path: Path) -> list[dict[str, Any]]:
        """The starts in run.json, oldest first."""
        file = path / "run.json"
        if not file.exists():
            return []
        try:
            starts = list(json.loads(file.read_text(encoding="utf-8"))["starts"])
            if any({"model", "plan", "world"} - set(start) for start in starts):
                raise ValueError
            return starts
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{file} cannot be read as the record of a run; give another folder") from None

    def _drop_after(self, step: int) -> None:
        """Drop the lines of steps that a resumed run will repeat."""
        file = self.path / "steps.jsonl"
        if not file.exists():
            return
        kept = []
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a truncated line of a killed run
                if json.loads(line)["step"] <= step:
                    kept.append(line)
        temporary = file.with_suffix(".new")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(file)

    def on_step(self, engine: Engine, info: StepInfo) -> None:
        if info.is_logged:
            self._log(info.step, info.numbers())

    def on_evaluation(self, engine: Engine, info: StepInfo) -> None:
        self._log(info.step, {"step": info.step, "epoch": info.epoch, **info.values})

    def _log(self, step: int, numbers: dict[str, Any]) -> None:
        if self._lines is None:
            return
        try:
            self._lines.write(json.dumps({name: _plain(value) for name, value in numbers.items()}) + "\n")
            self._lines.flush()
        except OSError as error:
            raise UnisonoError(
                f"step {step} cannot be logged in {self._lines.name}: {error.strerror}; checkpoints are intact, and "
                "resume=True continues from the newest"
            ) from None

    def write_program(self, page: str) -> None:
        """Write the page of the distributed program, if there is one; a full disk is not an error."""
        file = self.path / "program.html"
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)  # of an earlier start, under another plan
            if page:
                file.write_text(page, encoding="utf-8")

    def write_rank(self, measured: dict[str, Any]) -> None:
        """Write this rank's file for the report; a full disk is not an error."""
        with contextlib.suppress(OSError):
            _write(self.path / "ranks" / f"{self._rank}.json", measured)

    def on_end(self, engine: Engine, info: StepInfo | None) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            with contextlib.suppress(OSError):  # the error has been raised before
                lines.close()


def _plain(value: Any) -> Any:
    """None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(model: Any) -> str:
    return f"{model['name']} with {model['parameters']:,} parameters" if isinstance(model, dict) else str(model)


def _write(path: Path, value: Any) -> None:
    temporary = path.with_suffix(path.suffix + ".new")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.replace(path)
