"""`unisono plan`: its options, its table and its JSON; and `unisono bench hardware`."""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.amounts import format_bytes, format_count, format_seconds
from unisono.errors import UsageError
from unisono.plan.plan import Plan

if TYPE_CHECKING:
    from unisono.plan.search.search import Candidate, Result, Search
    from unisono.plan.search.why_not import Rejection
    from unisono.planner.planner import Planner
    from unisono.simulate.dry_run import DryRun

_FEW_STAGES = 8  # whose boundaries a table shows
_WIDE = 1000  # columns: more than any plan has


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan", help="find the fastest plan that fits, and say why not others", allow_abbrev=False
    )
    add = parser.add_argument
    add("task", metavar="train.py|task.py:name", help="a training script with a uni.Engine, or a uni.Task")
    add("--devices", type=int, required=True, metavar="N", help="devices to plan for")
    add("--hardware", required=True, metavar="FILE.toml", help="the machine, or one that is known: h100, h200, a100")
    add("--batch", type=int, metavar="B", help="samples of a step (default: those of the task's batch)")
    add(
        "--precision",
        metavar="P",
        help="fp32, bf16, fp16 or fp8, with options as in bf16,reduce=bf16 (default: the task's)",
    )
    add("--memory", metavar="SIZE", help="the most that a rank may need, as 80GiB (default: what the hardware has)")
    add("--compile", action="store_true", help="plans are to be compiled")
    add("--top", type=int, default=10, metavar="K", help="plans to show (default: 10)")
    add("--plan", metavar="PLAN", help="judge this plan instead of searching")
    add("--dry-run", action="store_true", help="run one rank of the plan here, with communication simulated")
    add("--rank", type=int, default=0, metavar="R", help="the rank to run (default: 0)")
    add("--activations", action="store_true", help="what one sample's activations take, layer by layer; no search")
    add("--json", action="store_true", help="print all of it as JSON")
    add("--quiet", action="store_true", help="print the plan alone, as --plan of unisono run takes it")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    _require_sense(chosen)
    from unisono.parallel.precision import Precision
    from unisono.parallel.task import load_task
    from unisono.plan.hardware.toml import read_hardware
    from unisono.plan.search.search import Result
    from unisono.plan.search.why_not import why_not
    from unisono.planner.planner import Planner, limited

    hardware = limited(read_hardware(chosen.hardware).with_devices(chosen.devices), chosen.memory, "--memory ")
    precision = None if chosen.precision is None else Precision.of(chosen.precision)
    task = load_task(chosen.task)
    began = time.perf_counter()
    planner = Planner(task, hardware, chosen.batch, precision=precision)
    task = planner.task
    if chosen.activations:
        return _show_activations(planner, chosen)
    search = planner.search(chosen.devices)
    if chosen.plan:
        given = Plan.parse(chosen.plan).fit(chosen.devices)
        refusal = search.refusal(given)
        if refusal:
            raise UsageError(f"plan {given}: {refusal}")
        judged = search.judged(given, played=True)
        result = Result([judged], 1, int(judged.fits))
    else:
        result = search.run(chosen.top)
    if chosen.compile:
        result.candidates = [replace(each, plan=each.plan.but(compile=True)) for each in result.candidates]
    notes = planner.assumptions(compile=result.best.plan.compile)
    rejected = why_not(search, result.best)
    seconds = time.perf_counter() - began
    tried = None
    if chosen.dry_run:
        from unisono.simulate.dry_run import dry_run

        tried = dry_run(task, result.best.plan, chosen.rank, planner.batch)
    if chosen.json:
        print(
            json.dumps(
                _as_json(search, result, rejected, seconds, tried)
                | {"precision": planner.precision.name, "assumed": notes},
                indent=1,
            )
        )
    elif chosen.quiet:
        print(result.best.plan)
    else:
        _show(search, result, rejected, seconds, tried, notes)
    return 0


def _show_activations(planner: Planner, chosen: argparse.Namespace) -> int:
    from unisono.planner.activation_table import activation_rows, show

    rows = activation_rows(planner, chosen.devices)
    print(json.dumps([row.as_json() for row in rows], indent=1) if chosen.json else show(planner.profile, rows))
    return 0


def _require_sense(chosen: argparse.Namespace) -> None:
    if chosen.devices < 1:
        raise UsageError(f"--devices {chosen.devices}: expected at least 1")
    if chosen.top < 1:
        raise UsageError(f"--top {chosen.top}: expected at least 1")
    if chosen.batch is not None and chosen.batch < 1:
        raise UsageError(f"--batch {chosen.batch}: expected at least 1")
    if not 0 <= chosen.rank < chosen.devices:
        raise UsageError(f"--rank {chosen.rank}: expected one of 0 to {chosen.devices - 1}")


def shown(plan: Plan) -> str:
    """A plan for a table: boundaries of many stages are long."""
    if len(plan.boundaries) <= _FEW_STAGES:
        return str(plan)
    return f"{plan.but(boundaries=())},boundaries={'+'.join(map(str, plan.boundaries[:3]))}+..."


def _show(
    search: Search, result: Result, rejected: list[Rejection], seconds: float, tried: DryRun | None, notes: list[str]
) -> None:
    from rich.console import Console
    from rich.table import Table

    # Lines that are longer than a terminal are left for it to wrap: plans are there to be copied.
    console = Console(highlight=False, soft_wrap=True)
    profile, hardware = search.profile, search.hardware
    size = format_count(profile.parameters + profile.frozen)
    console.print(
        f"{profile.name}: {size} parameters, computed in {profile.dtype}, batch {profile.batch}, on "
        f"{search.world} devices ({hardware.name})",
        markup=False,
    )
    took = format_seconds(seconds, "s", 1)
    console.print(f"{result.considered:,} plans considered, {result.fitting:,} fit, in {took}\n", markup=False)
    table = Table(box=None, pad_edge=False)
    for title in ("plan", "step", "memory", "bubble", "sent"):
        table.add_column(title, justify="left" if title == "plan" else "right", no_wrap=True)
    for each in result.candidates:
        table.add_row(
            shown(each.plan),
            format_seconds(each.seconds),
            format_bytes(each.footprint.total),
            f"{each.duration.bubble_share:.0%}",
            format_bytes(each.duration.sent),
        )
    console.width = max(console.width, console.measure(table, options=console.options.update(max_width=_WIDE)).maximum)
    console.print(table)
    _show_best(console, search, result.best)
    for note in notes:
        console.print(f"assumed: {note}", markup=False)
    console.print("\nwhy not")
    for rejection in rejected:
        console.print(f"  {rejection}", markup=False)
    if tried is not None:
        console.print(f"\n{tried}", markup=False)


def _show_best(console: Any, search: Search, best: Candidate) -> None:
    parts = {name: size for name, size in best.footprint.parts().items() if size}
    memory = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    console.print(f"\nmemory of a device (pipeline rank {best.footprint.stage}): {memory};", markup=False)
    hardware = search.hardware
    note = f"  {hardware.margin:.0%} of {format_bytes(hardware.memory)} is kept free for fragments and context"
    if hardware.limit is not None:
        note = f"  a rank may need {format_bytes(hardware.limit)}"
    if not best.fits:
        note += f"; the plan does not fit: it {hardware.short_of(best.footprint.total)}"
    console.print(note, markup=False)
    names = ("compute", "tensor", "bubble", "gradients", "optimizer")
    spent = {name: getattr(best.duration, name) for name in names}
    console.print(
        "step: " + ", ".join(f"{name} {format_seconds(value)}" for name, value in spent.items() if value), markup=False
    )
    if best.plan.pp > 1:
        stages = search.stages(best.plan)
        sizes = [len(span) for span in stages.spans]
        each = f"{sizes[0]} block{'s' if sizes[0] > 1 else ''} a stage"
        note = each if len(set(sizes)) == 1 else f"stages of {', '.join(map(str, sizes))} blocks"
        console.print(note, markup=False)
        if len(best.plan.boundaries) > _FEW_STAGES:
            console.print(f"  boundaries={'+'.join(map(str, stages.starts))}", markup=False)


def _as_json(
    search: Search, result: Result, rejected: list[Rejection], seconds: float, tried: DryRun | None
) -> dict[str, Any]:
    return {
        "task": search.profile.name,
        "parameters": search.profile.parameters + search.profile.frozen,
        "batch": search.profile.batch,
        "devices": search.world,
        "hardware": search.hardware.name,
        "usable_memory": search.hardware.usable_memory,
        "considered": result.considered,
        "fitting": result.fitting,
        "planning_seconds": seconds,
        "plans": [_candidate(search, each) for each in result.candidates],
        "why_not": [
            {"change": r.change, "plan": str(r.plan), "reason": r.reason, "seconds": r.seconds, "memory": r.memory}
            for r in rejected
        ],
        **({"dry_run": tried.as_json()} if tried is not None else {}),
    }


def _candidate(search: Search, each: Candidate) -> dict[str, Any]:
    names = ("compute", "tensor", "bubble", "gradients", "optimizer")
    return {
        "plan": str(each.plan),
        "boundaries": list(search.stages(each.plan).starts) if each.plan.pp > 1 else [],
        "seconds": each.seconds,
        "parts": {name: getattr(each.duration, name) for name in names},
        "bubble": each.duration.bubble_share,
        "sent": each.duration.sent,
        "memory": each.footprint.total,
        "memory_parts": each.footprint.parts(),
    }


# ---- unisono bench hardware ------------------------------------------------------------------------------------------


def add_bench_kind(kinds: Any) -> None:
    parser = kinds.add_parser("hardware", help="measure this machine for the planner")
    add = parser.add_argument
    add("-n", "-np", dest="n", type=int, default=2, metavar="N", help="ranks that share the machine (default: 2)")
    add("--backend", choices=("gloo", "mpi"), help="default: gloo")
    add("--brief", action="store_true", help="in some seconds, for a first look: predictions are further off")
    add("-o", "--output", metavar="FILE", help="write the tables there instead of printing them")
    add("--json", action="store_true", help="the same tables as JSON")
    add("--quiet", action="store_true", help="print only errors: the tables are in the file of -o")
    parser.set_defaults(handler=_bench_hardware)


def _bench_hardware(chosen: argparse.Namespace) -> int:
    if chosen.n < 1:
        raise UsageError(f"-n {chosen.n}: expected at least 1")
    if chosen.quiet and chosen.output is None:
        raise UsageError("--quiet prints nothing, and no file is named; add -o FILE")
    if chosen.output is not None and not Path(chosen.output).resolve().parent.is_dir():
        raise UsageError(f"-o {chosen.output}: the folder does not exist")
    import torch

    from unisono.plan.hardware.toml import write_hardware
    from unisono.planner.measure.machine import measure

    comment = f"Measured by `unisono bench hardware` with torch {torch.__version__}."
    text = write_hardware(measure(chosen.n, chosen.backend, chosen.brief), comment)
    text = json.dumps(tomllib.loads(text), indent=1) + "\n" if chosen.json else text
    if chosen.output is None:
        print(text, end="")
        return 0
    try:
        Path(chosen.output).write_text(text)
    except OSError as error:
        raise UsageError(f"-o {chosen.output}: cannot be written: {error.strerror}") from None
    if not chosen.quiet:
        print(f"wrote {chosen.output}")
    return 0
