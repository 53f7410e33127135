"""A run, read back from its folder (see train/run_folder.py)."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.plan.plan import Plan


@dataclass(frozen=True)
class Run:
    """What a run's folder tells: its starts, its steps, and what each rank of the last start held."""

    path: Path
    starts: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    program: str = ""  # the distributed program as a page, where the run could be traced

    @classmethod
    def read(cls, path: Path) -> Run:
        """UsageError where the folder is no run's."""
        file = path / "run.json"
        if not path.is_dir():
            raise UsageError(f"there is no folder {path}; give the folder that fit(save=...) was given")
        if not file.is_file():
            raise UsageError(f"{path} has no run.json; give the folder that fit(save=...) was given")
        try:
            starts = json.loads(file.read_text(encoding="utf-8"))["starts"]
            plan = Plan.parse(starts[-1]["plan"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UsageError(f"{file} cannot be read as the record of a run: {error}") from None
        steps = list(_lines(path / "steps.jsonl"))
        ranks = {}
        for rank in range(plan.world):
            with contextlib.suppress(OSError, ValueError):  # a rank that was killed has written none
                told = json.loads((path / "ranks" / f"{rank}.json").read_text(encoding="utf-8"))
                if told.get("plan", str(plan)) == str(plan):  # else it is of an earlier start
                    ranks[rank] = told
        page = path / "program.html"
        return cls(path, starts, steps, ranks, page.read_text(encoding="utf-8") if page.is_file() else "")

    @property
    def plan(self) -> Plan:
        return Plan.parse(self.starts[-1]["plan"])

    @property
    def predicted(self) -> dict[str, Any]:
        return self.starts[-1].get("predicted") or {}

    @property
    def why(self) -> list[list[str]]:
        """Why not another plan: as the last start said that searched for this one. One that resumes does not search."""
        told = [start.get("predicted") or {} for start in self.starts if start["plan"] == self.starts[-1]["plan"]]
        return next((each["why"] for each in reversed(told) if each.get("why")), [])

    def curve(self, name: str) -> list[tuple[float, float]]:
        """The values of a number over the steps."""
        pairs = [(line["step"], line.get(name)) for line in self.steps]
        return [(float(step), float(value)) for step, value in pairs if isinstance(value, int | float)]


def _lines(file: Path) -> Any:
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last one, cut short by a kill
                yield json.loads(line)
