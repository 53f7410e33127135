"""`unisono explain`: the distributed program of a task, as one rank will run it; no rank has to run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.plan.plan import Plan

if TYPE_CHECKING:
    from unisono.graph.lowering import Lowered
    from unisono.train.on_mesh import OnMesh
    from unisono.train.task import Task


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain", help="show the distributed program of a task: ops, shapes, collectives", allow_abbrev=False
    )
    add = parser.add_argument
    add("task", metavar="task.py:name", help="a uni.Task, or a function that returns one")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--mesh", metavar="MESH", help="axes such as dp=2,mp=4; also search=exact, memory=2GiB, full")
    where.add_argument("--plan", metavar="PLAN", help="a plan of dp and tp, whose cuts are shown")
    add("--rank", type=int, default=0, metavar="R", help="whose program (default: 0)")
    add("--html", metavar="FILE", help="write a page with a search box instead of text")
    add("--svg", metavar="FILE", help="write a drawing, collectives in colour")
    add("--save-graphs", metavar="DIR", help="write the program of every rank after each pass")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    lowered, world = _lowered(chosen)
    title = chosen.task.rpartition("/")[2]
    try:
        _write(lowered, chosen, world, title)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}; name a place that can be written") from None
    if not chosen.html and not chosen.svg:
        from unisono.graph.show import as_text

        print(as_text(lowered, chosen.rank, title))
    return 0


def _write(lowered: Lowered, chosen: argparse.Namespace, world: int, title: str) -> None:
    """The files that were asked for."""
    if chosen.save_graphs:
        from unisono.graph.saving import save

        save(lowered, Path(chosen.save_graphs), range(world))
    if chosen.html:
        from unisono.graph.page import as_page

        Path(chosen.html).write_text(as_page(lowered, chosen.rank, title))
    if chosen.svg:
        from unisono.graph.drawing import as_svg

        Path(chosen.svg).write_text(as_svg(lowered, chosen.rank, title))


def _lowered(chosen: argparse.Namespace) -> tuple[Lowered, int]:
    """The program, and how many ranks it is for."""
    from unisono.train.on_mesh import OnMesh
    from unisono.train.task import load_task

    plan = None if chosen.plan is None else Plan.parse(chosen.plan)
    on_mesh = OnMesh.parse(chosen.mesh) if plan is None else mesh_of(plan)
    if not 0 <= chosen.rank < on_mesh.world:
        raise UsageError(f"--rank {chosen.rank}: {on_mesh} has ranks 0 to {on_mesh.world - 1}")
    return lowered_task(load_task(chosen.task), on_mesh, by_rules=plan is not None), on_mesh.world


def mesh_of(plan: Plan) -> OnMesh:
    """The mesh of a plan whose program can be shown."""
    from unisono.train.on_mesh import OnMesh

    shown = Plan(dp=plan.dp, tp=plan.tp)
    if plan != shown:
        raise UsageError(
            f"--plan {plan}: a program is made of splits of tensors, so only dp and tp are shown; "
            f"use --plan {shown}, or --mesh, which takes zero too"
        )
    axes = tuple((name, getattr(plan, name)) for name in ("dp", "tp") if getattr(plan, name) > 1)
    return OnMesh(axes or (("dp", 1),))


def lowered_task(task: Task, on_mesh: OnMesh, *, by_rules: bool = False) -> Lowered:
    """What the ranks of a mesh would do, found without them; a model that can be built on meta takes no memory.

    by_rules: the axis tp cuts the layers that it cuts under a plan, unless the user's marks use it."""
    from unisono.graph.finding import find, follow
    from unisono.graph.lowering import lower
    from unisono.graph.trace import trace
    from unisono.graph.zero import in_pieces, require_stage
    from unisono.train.rule_marks import AXIS, RuleMarks, is_marked
    from unisono.train.sketch import without_memory

    model = without_memory(task)
    mesh = on_mesh.described()
    example = task.batch(0)
    traced = trace(model, example, task.loss, unpacked=on_mesh.unpack)
    require_stage(on_mesh.zero, mesh)
    if by_rules and AXIS in mesh.names and not is_marked(traced, mesh):
        traced = trace(model, example, task.loss, unpacked=True)
        rules = RuleMarks.of(task, model, example, traced, mesh)
        found = follow(traced, mesh, rules.marks)
        found.notes |= rules.notes
    else:
        found = find(traced, mesh, on_mesh.search, on_mesh.fully_use_devices, on_mesh.memory)
    found = in_pieces(found) if on_mesh.zero > 1 else found
    return lower(found.trace, found, mesh)


def page_of_plan(task: Task, plan: Plan) -> str:
    """The program of rank 0 under a plan, as a page."""
    from unisono.graph.page import as_page

    return as_page(lowered_task(task, mesh_of(plan), by_rules=True), 0, f"program of plan {plan}")
