"""The distributed program of a run: what the first rank of each stage did and said in a step (train/transcript.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.graph.render.colours import COLOURS, OTHER
from unisono.graph.render.sizes import size_text
from unisono.report.run import Run

_HUES = {**COLOURS, "send": "#0b7285", "recv": "#0b7285", "broadcast": "#5f3dc4"}
_ENDS = {"send": "to", "recv": "from"}


@dataclass(frozen=True)
class Row:
    kind: str  # op, talk or part
    name: str
    shape: str
    where: str  # the module, or the ranks
    phase: str
    hue: str
    words: str  # what a search looks in


@dataclass(frozen=True)
class Program:
    title: str
    summary: str
    rows: list[Row]


def programs(run: Run) -> list[Program]:
    """One for each rank that wrote its own down."""
    found = []
    for rank, told in sorted(run.ranks.items()):
        lines = told.get("program") or []
        if lines:
            stages = sorted({line["stage"] for line in lines if "stage" in line})
            title = f"rank {rank}" + (f", stage {' and '.join(map(str, stages))}" if stages else "")
            found.append(Program(title, _summary(lines), [_row(line) for line in lines]))
    return found


def _summary(lines: list[dict[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for line in lines:
        name = "ops" if line["kind"] == "op" else line["name"]
        if line["kind"] != "part":
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _row(line: dict[str, Any]) -> Row:
    name, kind = line["name"], line["kind"]
    if kind == "part":
        stage = f" on stage {line['stage']}" if "stage" in line else ""
        name = f"{name} of microbatch {line['microbatch']}{stage}"
        return Row(kind, name, "", "", "", OTHER, name)
    where = line["path"]
    if kind == "talk":
        ends = _ENDS.get(name, "among")
        ranks = ", ".join(map(str, line["ranks"]))
        where = " ".join(filter(None, (f"{ends} {'rank' if name in _ENDS else 'ranks'} {ranks}", line["path"])))
        where += f" ({size_text(line['bytes'])})"
    words = " ".join((kind, name, line["shape"], where, line["phase"])).lower()
    return Row(kind, name, line["shape"], where, line["phase"], _HUES.get(name, OTHER), words)
