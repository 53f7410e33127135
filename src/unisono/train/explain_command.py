"""`unisono explain`: the distributed program of a task, as one rank will run it; no rank has to run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.plan.plan import Plan

if TYPE_CHECKING:
    from unisono.graph.lowering import Lowered
    from unisono.parallel.task import Task
    from unisono.verify.on_mesh import OnMesh


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain", help="show the distributed program of a task: ops, shapes, collectives", allow_abbrev=False
    )
    add = parser.add_argument
    add("task", metavar="task.py:name", help="a uni.Task, or a function that returns one")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--mesh", metavar="MESH", help="axes such as dp=2,mp=4; also search=exact, memory=2GiB, full")
    where.add_argument("--plan", metavar="PLAN", help="a plan, such as dp=2,tp=2,zero=3: its cuts and stages")
    add("--rank", type=int, default=0, metavar="R", help="whose program (default: 0)")
    add("--html", metavar="FILE", help="write a page with a search box instead of text")
    add("--svg", metavar="FILE", help="write a drawing, collectives in colour")
    add("--save-graphs", metavar="DIR", help="write the program of every rank after each pass")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    name = chosen.task.rpartition("/")[2]
    try:
        parts = _of_plan(chosen, name) if chosen.mesh is None else _of_mesh(chosen, name)
        for title, lowered in parts:
            _write(lowered, chosen, title, numbered=len(parts) > 1)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}; name a place that can be written") from None
    return 0


def _write(lowered: Lowered, chosen: argparse.Namespace, title: str, *, numbered: bool) -> None:
    """The text, or the files that were asked for; those of several stages have their numbers in their names."""
    from unisono.graph.drawing import as_svg
    from unisono.graph.page import as_page
    from unisono.graph.show import as_text

    for file, drawn in ((chosen.html, as_page), (chosen.svg, as_svg)):
        if file:
            path = Path(file)
            path = path.with_stem(f"{path.stem}-stage{lowered.stage}") if numbered else path
            path.write_text(drawn(lowered, chosen.rank, title))
    if not chosen.html and not chosen.svg:
        print(as_text(lowered, chosen.rank, title))


def _of_mesh(chosen: argparse.Namespace, name: str) -> list[tuple[str, Lowered]]:
    from unisono.graph.saving import save
    from unisono.parallel.task import load_task
    from unisono.verify.on_mesh import OnMesh

    on_mesh = OnMesh.parse(chosen.mesh)
    if not 0 <= chosen.rank < on_mesh.world:
        raise UsageError(f"--rank {chosen.rank}: {on_mesh} has ranks 0 to {on_mesh.world - 1}")
    lowered = lowered_task(load_task(chosen.task), on_mesh)
    if chosen.save_graphs:
        save(lowered, Path(chosen.save_graphs), range(on_mesh.world))
    return [(name, lowered)]


def _of_plan(chosen: argparse.Namespace, name: str) -> list[tuple[str, Lowered]]:
    from unisono.graph.saving import save
    from unisono.parallel.task import load_task
    from unisono.train.plan_program import PlanProgram

    plan = Plan.parse(chosen.plan)
    if not 0 <= chosen.rank < plan.world:
        raise UsageError(f"--rank {chosen.rank}: plan {plan} has ranks 0 to {plan.world - 1}")
    program = PlanProgram(load_task(chosen.task), plan)
    if chosen.save_graphs:
        for rank in range(plan.world):
            parts = program.parts(rank)
            for each in parts:
                inside = f"stage_{each.stage}" if len(parts) > 1 else ""
                save(each, Path(chosen.save_graphs), [rank], inside)
    return [(f"{name}, {program.about(each)}", each) for each in program.parts(chosen.rank)]


def lowered_task(task: Task, on_mesh: OnMesh) -> Lowered:
    """What the ranks of a mesh would do, found without them; a model that can be built on meta takes no memory."""
    from unisono.graph.finding import find
    from unisono.graph.lowering import lower
    from unisono.graph.trace import trace
    from unisono.graph.zero import in_pieces, require_stage
    from unisono.simulate.sketch import without_memory

    mesh = on_mesh.described()
    traced = trace(without_memory(task), task.batch(0), task.loss, unpacked=on_mesh.unpack)
    require_stage(on_mesh.zero, mesh)
    found = find(traced, mesh, on_mesh.search, on_mesh.fully_use_devices, on_mesh.memory)
    found = in_pieces(found) if on_mesh.zero > 1 else found
    return lower(found.trace, found, mesh)


def page_of_plan(task: Task, plan: Plan) -> str:
    """The program of rank 0 under a plan, as a page; of its first stage, where it has several."""
    from unisono.graph.page import as_page
    from unisono.train.plan_program import PlanProgram

    program = PlanProgram(task, plan)
    first = program.parts(0)[0]
    return as_page(first, 0, f"program of {program.about(first)}")
