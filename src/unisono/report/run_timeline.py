"""Timelines of the profiled step: the pipeline as planned and as measured, and a trace for Perfetto."""

from __future__ import annotations

import json
from typing import Any

from unisono.plan.plan import Plan
from unisono.plan.schedules.action import Action
from unisono.plan.schedules.picture import WORDS, draw_svg
from unisono.plan.schedules.schedule import Schedule, schedule
from unisono.plan.schedules.timeline import Costs, Span, Timeline, timeline
from unisono.report.run_record import Run


def pipeline_svgs(run: Run) -> tuple[str, str]:
    """SVG of the planned and of the measured timeline; "" without a pipeline, or without a measurement."""
    if run.plan.pp == 1:
        return "", ""
    order = _order(run.plan)
    measured = _measured(run, order)
    if measured is None:
        return draw_svg(timeline(order)), ""
    return draw_svg(timeline(order, _costs(measured)), unit="ms"), draw_svg(measured, unit="ms")


def _order(plan: Plan) -> Schedule:
    return schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks if plan.chunks > 1 else None)


def _measured(run: Run, order: Schedule) -> Timeline | None:
    """In milliseconds since the first action, on the ranks with index 0 on all other axes."""
    stages: dict[int, list[Span]] = {}
    for rank in run.ranks.values():
        if any(index for axis, index in rank["coordinate"].items() if axis != "pp"):
            continue
        stages[rank["coordinate"]["pp"]] = [
            Span(Action(kind, stage, microbatch), 1000 * start, 1000 * end)
            for kind, stage, microbatch, start, end in rank["spans"]
        ]
    if len(stages) < order.ranks or not all(stages.values()):
        return None
    first = min(span.start for spans in stages.values() for span in spans)
    shifted = [
        tuple(Span(span.action, span.start - first, span.end - first) for span in stages[rank])
        for rank in range(order.ranks)
    ]
    return Timeline(order, tuple(shifted))


def _costs(measured: Timeline) -> Costs:
    """The mean cost of each kind of action at each stage, so that both timelines have the same scale."""

    def mean(kind: str, default: float) -> list[float]:
        found: list[list[float]] = [[] for _ in range(measured.schedule.stages)]
        for spans in measured.spans:
            for span in spans:
                if span.action.kind == kind:
                    found[span.action.stage].append(span.end - span.start)
        return [sum(each) / len(each) if each else default for each in found]

    return Costs(mean("F", 1.0), mean("B", 0.0), mean("I", 0.0), mean("W", 0.0))


def trace_json(run: Run) -> str:
    """A trace for Perfetto or chrome://tracing: one process a rank, with its step and its pipeline actions."""
    began = min((data["step"]["began"] for data in run.ranks.values()), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, data in run.ranks.items():
        coordinate = ", ".join(f"{axis} {index}" for axis, index in data["coordinate"].items())
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} ({coordinate})"}})
        events.append(_event("step", rank, 0, data["step"]["began"] - began, data["step"]["ended"] - began))
        for kind, stage, microbatch, start, end in data["spans"]:
            name = f"{WORDS[kind]} {microbatch}"
            arguments = {"stage": stage, "microbatch": microbatch}
            events.append(_event(name, rank, 1, start - began, end - began, arguments))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(name: str, rank: int, row: int, start: float, end: float, arguments: Any = None) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return event if arguments is None else {**event, "args": arguments}
