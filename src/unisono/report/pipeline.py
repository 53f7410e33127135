"""The pipeline of a run, as planned and as it went."""

from __future__ import annotations

from unisono.plan.plan import Plan
from unisono.plan.schedules.action import Action
from unisono.plan.schedules.picture import draw_svg
from unisono.plan.schedules.schedule import Schedule, schedule
from unisono.plan.schedules.timeline import Costs, Span, Timeline, timeline
from unisono.report.run import Run


def pictures(run: Run) -> tuple[str, str]:
    """SVG of the planned and of the measured timeline; empty where there is no pipeline, or no measurement."""
    if run.plan.pp == 1:
        return "", ""
    order = _order(run.plan)
    measured = _measured(run, order)
    if measured is None:
        return draw_svg(timeline(order)), ""
    return draw_svg(timeline(order, _costs(measured))), draw_svg(measured)


def _order(plan: Plan) -> Schedule:
    return schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks if plan.chunks > 1 else None)


def _measured(run: Run, order: Schedule) -> Timeline | None:
    """Milliseconds since the first action, of the ranks that are first in all other axes."""
    stages: dict[int, list[Span]] = {}
    for told in run.ranks.values():
        if any(place for axis, place in told["coordinate"].items() if axis != "pp"):
            continue
        stages[told["coordinate"]["pp"]] = [
            Span(Action(kind, stage, microbatch), 1000 * start, 1000 * end)
            for kind, stage, microbatch, start, end in told["spans"]
        ]
    if len(stages) < order.ranks or not all(stages.values()):
        return None
    first = min(span.start for spans in stages.values() for span in spans)
    moved = [
        tuple(Span(span.action, span.start - first, span.end - first) for span in stages[rank])
        for rank in range(order.ranks)
    ]
    return Timeline(order, tuple(moved))


def _costs(measured: Timeline) -> Costs:
    """The mean cost of each kind of action at each stage, so that both pictures have one scale."""

    def mean(kind: str, default: float) -> list[float]:
        found: list[list[float]] = [[] for _ in range(measured.schedule.stages)]
        for spans in measured.spans:
            for span in spans:
                if span.action.kind == kind:
                    found[span.action.stage].append(span.end - span.start)
        return [sum(each) / len(each) if each else default for each in found]

    return Costs(mean("F", 1.0), mean("B", 0.0), mean("I", 0.0), mean("W", 0.0))
