"""`unisono verify`: its options, its tables and its exit code."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.plan.plan import Plan

if TYPE_CHECKING:
    from unisono.parallel.task import Task
    from unisono.verify.compare import Verdict
    from unisono.verify.mesh_program import ProgramSpec


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify", help="prove that a plan gives the result of one device", allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "task",
        metavar="train.py|task.py:name",
        help="a training script with a uni.Engine, or a uni.Task, or a function that returns one",
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--plan", metavar="PLAN", help='such as dp=2,tp=2,zero=1; "all" for every shape that fits -n')
    subject.add_argument(
        "--program", metavar="MESH", help="the distributed program on a mesh such as dp=2,mp=4 (search=exact, full)"
    )
    add("-n", "-np", dest="n", type=int, metavar="N", help="ranks (default: what the plan needs)")
    add("--backend", choices=("gloo", "nccl", "mpi"), help="default: gloo")
    add("--steps", type=int, default=3, metavar="K", help="training steps (default: 3)")
    add("--dtype", choices=("float64", "float32", "bfloat16", "float16"), default="float64")
    add("--timeout", type=float, metavar="S", help="seconds that a collective may block (default: 600)")
    add("--json", action="store_true", help="print the verdict as JSON")
    add("--quiet", action="store_true", help="print only plans that are not equivalent; the exit code has the rest")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    """0 only when every plan that was run is equivalent, and at least one was."""
    if chosen.steps < 1:
        raise UsageError(f"--steps {chosen.steps}: expected at least 1")
    if chosen.n is not None and chosen.n < 1:
        raise UsageError(f"-n {chosen.n}: expected at least 1 rank")
    if chosen.program is not None:
        spec = _program_spec(chosen.program)
        return _run_one(chosen, spec.fit(spec.world if chosen.n is None else chosen.n))
    if not chosen.plan.strip(" ,"):
        raise UsageError('--plan is empty; give a plan such as dp=2,tp=2 (dp=1 for one device), or "all"')
    if chosen.plan != "all" and chosen.plan.lower() == "all":
        raise UsageError(f'--plan {chosen.plan}: every plan that fits is "all", in small letters')
    if chosen.plan != "all":
        plan = Plan.parse(chosen.plan)
        return _run_one(chosen, plan.fit(plan.world if chosen.n is None else chosen.n))
    if chosen.n is None:
        raise UsageError("--plan all needs -n N: which plans fit depends on the number of ranks")
    return _run_all(chosen)


def _program_spec(text: str) -> ProgramSpec:
    from unisono.verify.mesh_program import ProgramSpec  # imports torch

    return ProgramSpec.parse(text)


def _run_one(chosen: argparse.Namespace, plan: Plan | ProgramSpec) -> int:
    from unisono.verify.verify import verify

    verdict = verify(_task(chosen), plan, None, chosen.backend, chosen.steps, chosen.dtype, chosen.timeout)
    if chosen.json:
        print(json.dumps(verdict.as_json(), indent=1))
    elif not (chosen.quiet and verdict.equivalent):
        _show(verdict)
    return 0 if verdict.equivalent else 1


def _task(chosen: argparse.Namespace) -> Task | str:
    """The task's address, which ranks load by themselves; what a script trains is handed to them."""
    from unisono.parallel.task import is_script, load_task

    task = load_task(chosen.task)  # a bad address is an error before ranks start
    if not is_script(chosen.task):
        return str(chosen.task)
    if chosen.backend == "mpi":
        raise UsageError(
            f"verify {chosen.task} --backend mpi: ranks of MPI cannot be handed what a script trains; use gloo, or a "
            "uni.Task: file.py:name"
        )
    return task


def _run_all(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from unisono.parallel.task import load_task
    from unisono.verify.plan_grid import PlanGrid, plans_for
    from unisono.verify.verify import verify_all

    task = _task(chosen)
    plans = plans_for(chosen.n, _has_experts(load_task(task) if isinstance(task, str) else task))
    how = chosen.backend, chosen.steps, chosen.dtype
    grid = PlanGrid(Console(highlight=False), plans)
    if chosen.json:
        verdicts = verify_all(task, plans, *how, timeout=chosen.timeout)
        print(json.dumps(_as_json(chosen, verdicts), indent=1))
    elif chosen.quiet:
        verdicts = verify_all(task, plans, *how, timeout=chosen.timeout)
        for verdict in verdicts:
            if not verdict.equivalent and not verdict.refusal:
                _show(verdict)
    else:
        grid.begin()
        verdicts = verify_all(task, plans, *how, on_verdict=grid.show, timeout=chosen.timeout)
        grid.end()
    judged = [verdict for verdict in verdicts if not verdict.refusal]
    return 0 if judged and all(verdict.equivalent for verdict in judged) else 1


def _has_experts(task: Task) -> bool:
    """Whether the model has experts to share out; seen without the memory of its parameters, where it can be."""
    import torch

    from unisono.mesh.side_effects import no_side_effects
    from unisono.parallel.expert.expert import MoE

    try:
        with no_side_effects(task.model), torch.device("meta"):
            model = task.model()
    except Exception:
        return False  # it cannot be built without values: its plans are tried without ep
    return any(isinstance(module, MoE) for module in model.modules())


def _as_json(chosen: argparse.Namespace, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "task": chosen.task,
        "ranks": chosen.n,
        "steps": chosen.steps,
        "dtype": chosen.dtype,
        "equivalent": sum(verdict.equivalent for verdict in verdicts),
        "different": sum(verdict.ran and not verdict.equivalent for verdict in verdicts),
        "refused": sum(bool(verdict.refusal) for verdict in verdicts),
        "failed": sum(bool(verdict.failure) for verdict in verdicts),
        "plans": [verdict.as_json() for verdict in verdicts],
    }


def _show(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not verdict.ran:
        console.print(f"plan {verdict.plan} {'[yellow]refused[/]' if verdict.refusal else '[red]failed[/]'}: ", end="")
        console.print(verdict.refusal or verdict.failure, markup=False)
        return
    table = Table(title=f"plan {verdict.plan}", title_justify="left")
    for column in ("kind", "tensors", "worst deviation", "of"):
        table.add_column(column, justify="right" if column in ("tensors", "worst deviation") else "left")
    for each in verdict.worst:
        shown = "bit for bit" if each.deviation == 0 else f"{each.deviation:.1e}"
        table.add_row(each.kind, str(each.compared), shown, each.name)
    console.print(table)
    for line in filter(None, (verdict.note, verdict.coverage, verdict.compilation)):
        console.print(line, markup=False)
    console.print("[green]equivalent[/]" if verdict.equivalent else "[red]NOT equivalent[/]")
    if verdict.first_divergence:
        console.print(f"  first divergence: {verdict.first_divergence}", markup=False)
    if verdict.guess:
        console.print(f"  looks like: {verdict.guess}", markup=False)
