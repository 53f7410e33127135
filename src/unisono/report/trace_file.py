"""The watched step of every rank as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

from unisono.plan.schedules.picture import WORDS
from unisono.report.run import Run


def trace_json(run: Run) -> str:
    """A process a rank; its step, and in a pipeline every action, in microseconds."""
    began = min((told["step"]["began"] for told in run.ranks.values()), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, told in run.ranks.items():
        places = ", ".join(f"{axis} {place}" for axis, place in told["coordinate"].items())
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} ({places})"}})
        events.append(_event("step", rank, 0, told["step"]["began"] - began, told["step"]["ended"] - began))
        for kind, stage, microbatch, start, end in told["spans"]:
            name = f"{WORDS[kind]} {microbatch}"
            about = {"stage": stage, "microbatch": microbatch}
            events.append(_event(name, rank, 1, start - began, end - began, about))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(name: str, rank: int, row: int, start: float, end: float, about: Any = None) -> dict[str, Any]:
    moment = {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return moment if about is None else {**moment, "args": about}
