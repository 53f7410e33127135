"""Run: the contents of a run folder (see train/telemetry/run_folder.py)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.plan.plan import Plan
from unisono.plan.schedules.picture import WORDS
from unisono.regular_files import parse_json, read_json, read_text

_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)
_MOST = 1 << 16  # ranks, and actions of a pipeline


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
            starts = list(read_json(file)["starts"])
            plan = Plan.parse(starts[-1]["plan"])
        except (OSError, *_MALFORMED) as error:
            raise UsageError(f"{file} cannot be read as the record of a run: {str(error)[:200]}") from None
        if max(plan.world, plan.pp * plan.chunks * plan.microbatches) > _MOST:
            raise UsageError(f"{file}: plan {str(plan)[:200]} is of more than {_MOST} ranks or actions; none is drawn")
        ranks = {}
        for rank in sorted(_ranks(path / "ranks", plan.world)):
            with contextlib.suppress(OSError, *_MALFORMED):  # a killed rank has written none, or a part
                data = read_json(path / "ranks" / f"{rank}.json")
                if data.get("plan", str(plan)) == str(plan):  # else it is of an earlier start
                    data["spans"] = [_span(*span) for span in data["spans"]]
                    ranks[rank] = data
        page = ""
        try:
            steps = [line for line in _lines(path / "steps.jsonl") if isinstance(line, dict) and "step" in line]
            if (path / "program.html").exists():
                page = read_text(path / "program.html")
        except (OSError, ValueError) as error:
            raise UsageError(f"the run in {path} cannot be read: {str(error)[:200]}") from None
        return cls(path, starts, steps, ranks, page)

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
    if file.exists():
        for line in read_text(file).splitlines():
            with contextlib.suppress(ValueError):  # a truncated last line of a killed run
                yield parse_json(line)


def _ranks(folder: Path, world: int) -> Iterator[int]:
    """Those that have written a file."""
    for file in folder.glob("*.json"):
        if re.fullmatch("[0-9]{1,9}", file.stem) and int(file.stem) < world:
            yield int(file.stem)


def _span(kind: Any, stage: Any, microbatch: Any, start: Any, end: Any) -> tuple[str, int, int, float, float]:
    """An action of the profiled step; TypeError or ValueError for what is none, which would be drawn as it stands."""
    if kind not in WORDS:
        raise ValueError(f"the action {kind!r}")
    return kind, int(stage), int(microbatch), float(start), float(end)
