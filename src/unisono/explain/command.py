"""`unisono explain`: the distributed program of a task, as one rank runs it; no other rank is needed."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.plan.plan import Plan

if TYPE_CHECKING:
    from unisono.graph.program.lowering import Lowered
    from unisono.graph.render.listing import Listing
    from unisono.parallel.task import Task
    from unisono.verify.mesh_program import ProgramSpec


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain", help="show the distributed program of a task: ops, shapes, collectives", allow_abbrev=False
    )
    add = parser.add_argument
    add("task", metavar="train.py|task.py:name", help="a training script with a uni.Engine, or a uni.Task")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--mesh", metavar="MESH", help="axes such as dp=2,mp=4; also search=exact, memory=2GiB, full")
    where.add_argument("--plan", metavar="PLAN", help="a plan, such as dp=2,tp=2,zero=3")
    add("--rank", type=int, default=0, metavar="R", help="whose program (default: 0)")
    add("--html", metavar="FILE", help="write a page with a search box instead of text")
    add("--svg", metavar="FILE", help="write a drawing, collectives in colour")
    add("--save-graphs", metavar="DIR", help="write the program of every rank; with --mesh after each pass")
    add("--json", action="store_true", help="print the program as JSON")
    add("--quiet", action="store_true", help="print only warnings: the program is in the files that are named")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    from unisono.graph.render.html import as_page
    from unisono.graph.render.svg import as_svg
    from unisono.graph.render.text import as_text

    name = chosen.task.rpartition("/")[2]
    files = [file for file in (chosen.html, chosen.svg, chosen.save_graphs) if file]
    if chosen.quiet and not files:
        raise UsageError("--quiet prints nothing, and no file is named; add --html, --svg or --save-graphs")
    try:
        title, listing = _of_plan(chosen, name) if chosen.mesh is None else _of_mesh(chosen, name)
        for file, drawn in ((chosen.html, as_page), (chosen.svg, as_svg)):
            if file:
                Path(file).write_text(drawn(listing, title), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}; name a path that can be written") from None
    if chosen.json:
        print(json.dumps({"title": title, **listing.as_json(), "files": files}, indent=1))
        return 0
    if not chosen.quiet:
        if not chosen.html and not chosen.svg:
            print(as_text(listing, title))
        for file in files:
            print(f"wrote {file}")
    return 0


def _of_mesh(chosen: argparse.Namespace, name: str) -> tuple[str, Listing]:
    from unisono.graph.render.dump import save
    from unisono.graph.render.listing import listing_of
    from unisono.parallel.task import load_task
    from unisono.verify.mesh_program import ProgramSpec

    on_mesh = ProgramSpec.parse(chosen.mesh)
    if not 0 <= chosen.rank < on_mesh.world:
        raise UsageError(f"--rank {chosen.rank}: {on_mesh} has ranks 0 to {on_mesh.world - 1}")
    lowered = lowered_task(load_task(chosen.task), on_mesh)
    if chosen.save_graphs:
        save(lowered, Path(chosen.save_graphs), range(on_mesh.world))
    return name, listing_of(lowered, chosen.rank)


def _of_plan(chosen: argparse.Namespace, name: str) -> tuple[str, Listing]:
    from unisono.explain.plan_program import explained
    from unisono.graph.render.text import as_text
    from unisono.parallel.task import load_task

    plan = Plan.parse(chosen.plan)
    if not 0 <= chosen.rank < plan.world:
        raise UsageError(f"--rank {chosen.rank}: plan {plan} has ranks 0 to {plan.world - 1}")
    task = load_task(chosen.task)
    title = f"{name}, plan {plan}"
    if chosen.save_graphs:
        for rank in range(plan.world):
            file = Path(chosen.save_graphs) / f"rank_{rank}" / "program.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(as_text(explained(task, plan, rank), title) + "\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = explained(task, plan, chosen.rank)
    for message in dict.fromkeys(str(each.message) for each in caught):
        print(f"unisono: warning: {message}", file=sys.stderr)
    return title, found


def lowered_task(task: Task, on_mesh: ProgramSpec) -> Lowered:
    """What the ranks of a mesh would do, found without them; a model that can be built on meta takes no memory."""
    from unisono.graph.capture.trace import trace
    from unisono.graph.placement.find import find
    from unisono.graph.program.lowering import lower
    from unisono.graph.program.zero import in_shards, require_stage
    from unisono.simulate.sketch import without_memory

    mesh = on_mesh.described()
    traced = trace(without_memory(task), task.batch(0), task.loss, unpacked=on_mesh.unpack)
    require_stage(on_mesh.zero, mesh)
    found = find(traced, mesh, on_mesh.search, on_mesh.fully_use_devices, on_mesh.memory)
    found = in_shards(found) if on_mesh.zero > 1 else found
    return lower(found.trace, found, mesh)
