"""Run: the contents of a run folder (see train/telemetry/run_folder.py)."""

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
    """Starts and steps of a run, and the profile of each rank of the last start."""

    path: Path
    starts: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    program: str = ""  # page of the distributed program; "" if there is none

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run folder; UsageError if it is not one."""
        file = path / "run.json"
        if not path.is_dir():
            raise UsageError(f"the folder {path} does not exist; give the folder of fit(save=...)")
        if not file.is_file():
            raise UsageError(f"{path} has no run.json; give the folder of fit(save=...)")
        try:
            starts = json.loads(file.read_text(encoding="utf-8"))["starts"]
            plan = Plan.parse(starts[-1]["plan"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UsageError(f"{file} cannot be read as the record of a run: {error}") from None
        steps = list(_lines(path / "steps.jsonl"))
        ranks = {}
        for rank in range(plan.world):
            with contextlib.suppress(OSError, ValueError):  # a killed rank has written none
                data = json.loads((path / "ranks" / f"{rank}.json").read_text(encoding="utf-8"))
                if data.get("plan", str(plan)) == str(plan):  # else it is of an earlier start
                    ranks[rank] = data
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
        """Why not another plan: from the last start that searched for this one. A resumed run does not search."""
        predictions = [
            start.get("predicted") or {} for start in self.starts if start["plan"] == self.starts[-1]["plan"]
        ]
        return next((each["why"] for each in reversed(predictions) if each.get("why")), [])

    def curve(self, name: str) -> list[tuple[float, float]]:
        """The values of a number over the steps."""
        pairs = [(line["step"], line.get(name)) for line in self.steps]
        return [(float(step), float(value)) for step, value in pairs if isinstance(value, int | float)]


def _lines(file: Path) -> Any:
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a truncated last line of a killed run
                yield json.loads(line)
