"""The report of a run as one self-contained HTML file."""

from __future__ import annotations

import functools
import statistics
import time
from importlib import resources
from typing import Any

from unisono.amounts import format_bytes, format_seconds
from unisono.errors import MissingPackageError
from unisono.plan.plan import AXES, Plan
from unisono.report import charts
from unisono.report.program_listing import programs
from unisono.report.run_record import Run
from unisono.report.run_timeline import pipeline_svgs

_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def as_page(run: Run) -> str:
    """The file as text."""
    template = _template()
    planned, measured = pipeline_svgs(run)
    return template.render(
        name=run.path.resolve().name,
        facts=_facts(run),
        starts=[_start(start) for start in run.starts],
        mesh=charts.mesh_svg(run.plan),
        planned=planned,
        measured=measured,
        losses=charts.line_chart({"loss": run.curve("loss")} | _validation(run), "loss"),
        rates=charts.line_chart({"learning rate": run.curve("rate")}, "learning rate"),
        times=charts.line_chart(_times(run), "time of a step", "ms"),
        memory=charts.stacked_bars(_memory(run)),
        collectives=_collectives(run),
        why=run.why,
        programs=programs(run),
        static=run.program,
    )


@functools.cache
def _template() -> Any:
    try:
        import jinja2
    except ImportError:
        raise MissingPackageError("jinja2", "unisono report", "report") from None
    source = resources.files("unisono.report").joinpath("page.html").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)


def _facts(run: Run) -> list[tuple[str, str]]:
    start = run.starts[-1]
    losses = run.curve("loss")
    seconds = [value for _, value in run.curve("seconds")]
    facts = [
        ("model", f"{start['model']['name']}, {start['model']['parameters']:,} parameters"),
        ("plan", str(run.plan)),
        ("ranks", f"{start['world']} over {start['backend']}"),
        ("steps", f"{len(losses)} of {start['steps'] or 'unknown'} logged, {start['batch_size']} samples each"),
    ]
    if losses:
        facts.append(("loss", f"{losses[0][1]:.4f} first, {losses[-1][1]:.4f} last"))
    if seconds:
        text = f"{format_seconds(statistics.median(seconds))} measured (median)"
        if run.predicted.get("seconds"):
            text += f", {format_seconds(run.predicted['seconds'])} predicted"
        facts.append(("step time", text))
    facts.append(("software", f"torch {start['torch']}, Python {start['python']}, seed {start['seed']}"))
    return facts


def _start(start: dict[str, Any]) -> tuple[str, str, str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start["time"]))
    return when, start["plan"], f"from step {start['first_step']}"


def _validation(run: Run) -> dict[str, list[tuple[float, float]]]:
    names = dict.fromkeys(name for line in run.steps for name in line if name.startswith("validation_loss"))
    return {name.replace("_", " "): run.curve(name) for name in names}


def _times(run: Run) -> dict[str, list[tuple[float, float]]]:
    curves = {"measured": [(step, 1000 * value) for step, value in run.curve("seconds")]}
    predicted = [(step, 1000 * value) for step, value in run.curve("predicted_seconds")]
    return curves | ({"predicted": predicted} if predicted else {})


def _memory(run: Run) -> dict[str, dict[str, float]]:
    """By rank: predicted, if there is a prediction, and measured."""
    rows: dict[str, dict[str, float]] = {}
    stages = run.predicted.get("memory_by_stage") or []
    for rank, data in sorted(run.ranks.items()):
        if stages:
            predicted = stages[_index_on(run.plan, rank, "pp") % len(stages)]
            rows[f"rank {rank} predicted"] = {kind: predicted.get(kind, 0) for kind in _KINDS}
        rows[f"rank {rank}"] = {kind: data["memory"].get(kind, 0) for kind in _KINDS}
    return rows


def _index_on(plan: Plan, rank: int, axis: str) -> int:
    """The index of a rank on an axis of the mesh."""
    for name, size in reversed(list(zip(AXES, plan.shape, strict=True))):
        rank, index = divmod(rank, size)
        if name == axis:
            return index
    return 0


def _collectives(run: Run) -> list[tuple[str, int, str, str]]:
    """Of the profiled step, summed over ranks: kind, calls, payload, bytes sent."""
    names = sorted({op for data in run.ranks.values() for op in data["collectives"]})
    rows = []
    for op in names:
        found = [data["collectives"][op] for data in run.ranks.values() if op in data["collectives"]]
        calls, payload = sum(each["calls"] for each in found), sum(each["payload"] for each in found)
        rows.append((op, calls, format_bytes(payload), format_bytes(sum(each["sent"] for each in found))))
    return rows
