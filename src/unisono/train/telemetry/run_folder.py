"""The folder of a run, which `unisono report` reads.

run.json          model, plan and time; one entry for each start
steps.jsonl       one line for each step
ranks/N.json      profile and program of one step on rank N, written at the end
program.html      the program of a step beside that of one device
tensorboard/      the numbers of steps.jsonl, if tensorboard is installed (loggers.py)
profile/          traces of torch's profiler, with fit(profile_steps=...)
checkpoints/      see train/checkpoint/
run.lock          held by rank 0 while a job runs here (checkpoint/folder_lock.py)
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from unisono.amounts import format_bytes
from unisono.errors import UsageError
from unisono.regular_files import parse_json, read_json, read_text
from unisono.train.callbacks import Callback, StepInfo
from unisono.train.checkpoint.folder_lock import CHECKPOINTS, FolderLock

if TYPE_CHECKING:
    from unisono.train.engine import Engine


class RunFolder(Callback):
    """Rank 0 writes the numbers of the run; every rank its own file at the end."""

    def __init__(self, path: str | Path, rank: int) -> None:
        self.path = Path(path)
        self._rank = rank
        self._lines: BinaryIO | None = None
        self._is_torn = False  # whether a line was written in part: the disk was full

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @contextlib.contextmanager
    def held(self) -> Iterator[FolderLock]:
        """Keep other jobs out while this one runs; UsageError on every rank if one is there."""
        lock = FolderLock(self.path)
        try:
            yield lock
        finally:
            lock.release()

    def open(self, about: dict[str, Any], first_step: int) -> None:
        """Create the folder, or continue in it; UsageError if another model was trained there."""
        try:
            (self.path / "ranks").mkdir(parents=True, exist_ok=True)
            if self._rank == 0:
                self._begin(about, first_step)
        except OSError as error:
            raise UsageError(
                f"run folder {self.path}: cannot be created: {error.strerror}{free_space(self.path)}; use another path"
            ) from None

    def _begin(self, about: dict[str, Any], first_step: int) -> None:
        starts = self.starts(self.path)
        if starts and starts[-1]["model"] != about["model"]:
            raise UsageError(
                f"run folder {self.path} belongs to another model: {_shown(starts[-1]['model'])} was trained there, "
                f"this is {_shown(about['model'])}; give another folder"
            )
        self._drop_after(first_step)
        starts.append({**about, "first_step": first_step, "time": time.time()})
        _write(self.path / "run.json", {"starts": starts}, is_synced=True)
        self._lines = open(self.path / "steps.jsonl", "ab", buffering=0)  # noqa: SIM115  # open for the run
        self._is_torn = False

    @staticmethod
    def starts(path: Path) -> list[dict[str, Any]]:
        """The starts in run.json, oldest first."""
        file = path / "run.json"
        if not file.exists():
            return []
        if not file.stat().st_size:  # the machine went down, or the disk was full
            warnings.warn(
                f"{file} is empty: what was noted of earlier starts is lost; checkpoints are not", stacklevel=2
            )
            return []
        try:
            starts = list(read_json(file)["starts"])
            if any({"model", "plan", "world"} - set(start) for start in starts):
                raise ValueError
            return starts
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(f"{file} cannot be read as the record of a run; give another folder") from None

    def _drop_after(self, step: int) -> None:
        """Drop the lines of steps that a resumed run will repeat."""
        file = self.path / "steps.jsonl"
        if not file.exists():
            return
        kept = []
        try:
            lines = read_text(file).splitlines()
        except ValueError:
            raise UsageError(f"{file} is not the log of a run; give another folder") from None
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a truncated line of a killed run
                if parse_json(line)["step"] <= step:
                    kept.append(line)
        _replace(file, "".join(line + "\n" for line in kept))

    def on_step(self, engine: Engine, info: StepInfo) -> None:
        if info.is_logged:
            self._log(info.step, info.numbers())

    def on_evaluation(self, engine: Engine, info: StepInfo) -> None:
        self._log(info.step, {"step": info.step, "epoch": info.epoch, **info.values})

    def _log(self, step: int, numbers: dict[str, Any]) -> None:
        """Append a line; where that fails, training goes on, and later steps are logged again when they can be."""
        if self._lines is None:
            return
        line = json.dumps({name: _plain(value) for name, value in numbers.items()}).encode() + b"\n"
        line = b"\n" + line if self._is_torn else line
        was_torn = self._is_torn
        try:
            self._is_torn = self._lines.write(line) < len(line)
            reason = os.strerror(errno.ENOSPC)
        except OSError as error:
            self._is_torn, reason = True, error.strerror or str(error)
        if self._is_torn and not was_torn:
            warnings.warn(
                f"step {step} is not logged in {self.path / 'steps.jsonl'}: {reason}{free_space(self.path)}; training "
                "continues, and logs again when it can",
                RuntimeWarning,
                stacklevel=2,
            )

    def write_program(self, page: str) -> None:
        """Write the page of the distributed program, if there is one; a full disk is not an error."""
        file = self.path / "program.html"
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)  # of an earlier start, under another plan
            if page:
                _replace(file, page)

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


def free_space(folder: Path) -> str:
    try:
        return f", {format_bytes(shutil.disk_usage(folder).free)} are free there"
    except OSError:
        return ""


def _write(path: Path, value: Any, is_synced: bool = False) -> None:
    _replace(path, json.dumps(value, indent=1), is_synced)


def _replace(path: Path, text: str, is_synced: bool = False) -> None:
    """Write a file in one piece: what stood there stays if that fails, and nothing beside it."""
    temporary = path.with_suffix(path.suffix + ".new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
