"""The distributed program of a run: ops and communication of one step on the first rank of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.amounts import format_bytes, format_ranks
from unisono.graph.render.colours import COLOURS, OTHER
from unisono.report.run_record import Run

_HUES = {**COLOURS, "send": "#0b7285", "recv": "#0b7285", "broadcast": "#5f3dc4"}
_ENDS = {"send": "to", "recv": "from"}


@dataclass(frozen=True)
class Row:
    kind: str  # op, communication or part
    name: str
    shape: str
    where: str  # the module, or the ranks
    phase: str
    hue: str
    words: str  # text to search in


@dataclass(frozen=True)
class ProgramListing:
    title: str
    summary: str
    rows: list[Row]


def programs(run: Run) -> list[ProgramListing]:
    """One for each rank that recorded its program."""
    found = []
    for rank, data in sorted(run.ranks.items()):
        lines = data.get("program") or []
        if lines:
            stages = sorted({line["stage"] for line in lines if "stage" in line})
            title = f"rank {rank}" + (f", stage {' and '.join(map(str, stages))}" if stages else "")
            found.append(ProgramListing(title, _summary(lines), [_row(line) for line in lines]))
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
    if kind == "communication":
        ends = _ENDS.get(name, "among")
        ranks = format_ranks(line["ranks"], ", ")
        where = " ".join(filter(None, (f"{ends} {'rank' if name in _ENDS else 'ranks'} {ranks}", line["path"])))
        where += f" ({format_bytes(line['bytes'])})"
    words = " ".join((kind, name, line["shape"], where, line["phase"])).lower()
    return Row(kind, name, line["shape"], where, line["phase"], _HUES.get(name, OTHER), words)
