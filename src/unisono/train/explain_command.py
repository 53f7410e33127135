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
    where.add_argument("--mesh", metavar="MESH", help="axes such as dp=2,mp=4; also search=exact, full")
    where.add_argument("--plan", metavar="PLAN", help="a plan of dp, tp and cp, whose axes are the mesh's")
    add("--rank", type=int, default=0, metavar="R", help="whose program (default: 0)")
    add("--html", metavar="FILE", help="write a page with a search box instead of text")
    add("--svg", metavar="FILE", help="write a drawing, collectives in colour")
    add("--save-graphs", metavar="DIR", help="write the program of every rank after each pass")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    from unisono.train.task import load_task

    on_mesh = _on_mesh(chosen)
    if not 0 <= chosen.rank < on_mesh.world:
        raise UsageError(f"--rank {chosen.rank}: {on_mesh} has ranks 0 to {on_mesh.world - 1}")
    lowered = lowered_task(load_task(chosen.task), on_mesh)
    title = chosen.task.rpartition("/")[2]
    try:
        _write(lowered, chosen, on_mesh.world, title)
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


def _on_mesh(chosen: argparse.Namespace) -> OnMesh:
    from unisono.train.on_mesh import OnMesh

    return OnMesh.parse(chosen.mesh) if chosen.mesh is not None else _mesh_of(Plan.parse(chosen.plan))


def _mesh_of(plan: Plan) -> OnMesh:
    from unisono.train.on_mesh import OnMesh

    plain = Plan(dp=plan.dp, tp=plan.tp, cp=plan.cp)
    if plan != plain:
        raise UsageError(
            f"--plan {plan}: a program is made of splits of tensors, so only dp, tp and cp name its axes; "
            f"use --plan {plain}, or --mesh"
        )
    axes = tuple((name, getattr(plan, name)) for name in ("dp", "cp", "tp") if getattr(plan, name) > 1)
    return OnMesh(axes or (("dp", 1),))


def lowered_task(task: Task, on_mesh: OnMesh) -> Lowered:
    """What the ranks of a mesh would do, found without them; a model that can be built on meta takes no memory."""
    import torch

    from unisono.graph.finding import find
    from unisono.graph.lowering import lower
    from unisono.graph.trace import trace
    from unisono.graph.zero import in_pieces, require_stage
    from unisono.mesh.initial import build

    try:
        with torch.device("meta"):
            model = task.model()
    except Exception:
        model = build(task.model, 0)  # it looks at values while it is built
    mesh = on_mesh.described()
    traced = trace(model, task.batch(0), task.loss, unpacked=on_mesh.unpack)
    require_stage(on_mesh.zero, mesh)
    found = find(traced, mesh, on_mesh.search, on_mesh.fully_use_devices)
    found = in_pieces(found) if on_mesh.zero > 1 else found
    return lower(found.trace, found, mesh)


def page_of_plan(task: Task, plan: Plan) -> str:
    """The program of rank 0 on a plan's mesh, as a page."""
    from unisono.graph.page import as_page

    return as_page(lowered_task(task, _mesh_of(plan)), 0, f"program of plan {plan}")
