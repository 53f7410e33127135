"""`unisono verify`: its options, its table and its exit code."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.plan.plan import Plan

if TYPE_CHECKING:
    from unisono.train.verify import Verdict


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verify", help="prove that a plan gives the result of one device", allow_abbrev=False
    )
    add = parser.add_argument
    add("task", metavar="task.py:name", help="a uni.Task, or a function that returns one")
    add("--plan", required=True, metavar="PLAN", help='such as dp=2,tp=2,zero=1; "all" for every shape that fits -n')
    add("-n", "-np", dest="n", type=int, metavar="N", help="ranks (default: what the plan needs)")
    add("--backend", choices=("gloo", "nccl", "mpi"), help="default: gloo")
    add("--steps", type=int, default=3, metavar="K", help="training steps (default: 3)")
    add("--dtype", choices=("float64", "float32", "bfloat16", "float16"), default="float64")
    add("--json", action="store_true", help="print the verdict as JSON")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    """0 only when every plan that was run is equivalent."""
    if chosen.steps < 1:
        raise UsageError(f"--steps {chosen.steps}: expected at least 1")
    if chosen.plan == "all":
        if chosen.n is None:
            raise UsageError("--plan all needs -n N: which plans fit depends on the number of ranks")
        plans = list(plans_for(chosen.n))
    else:
        plan = Plan.parse(chosen.plan)
        plans = [plan.fit(plan.world if chosen.n is None else chosen.n)]
    from unisono.train.task import load_task
    from unisono.train.verify import verify

    load_task(chosen.task)  # a bad address is an error before ranks start
    verdicts = []
    for plan in plans:
        verdict = verify(chosen.task, plan, None, chosen.backend, chosen.steps, chosen.dtype)
        verdicts.append(verdict)
        if not chosen.json:
            _show(verdict, alone=len(plans) == 1)
    if chosen.json:
        told = [verdict.as_json() for verdict in verdicts]
        print(json.dumps(told[0] if len(told) == 1 else told, indent=1))
    ran = [verdict for verdict in verdicts if not verdict.refusal]
    refused = len(verdicts) - len(ran)
    if len(plans) > 1 and not chosen.json:
        good = sum(verdict.equivalent for verdict in ran)
        print(f"{good} of {len(ran)} plans equivalent" + (f", {refused} refused with a reason" if refused else ""))
    return 0 if ran and all(verdict.equivalent for verdict in ran) else 1


def plans_for(ranks: int) -> Iterator[Plan]:
    """Every shape of plan that needs `ranks` ranks: axes, and each ZeRO stage, sp and microbatches where they apply."""
    for dp, tp, pp in product(range(1, ranks + 1), repeat=3):
        if ranks % (dp * tp * pp):
            continue
        plain = Plan(dp=dp, tp=tp, pp=pp, cp=ranks // (dp * tp * pp), microbatches=2 * pp if pp > 1 else 1)
        yield plain
        if tp > 1:
            yield plain.but(sequence=True)
        if plain.cp > 1:
            yield plain.but(context="ulysses")
        for stage in (1, 2, 3) if dp * plain.cp > 1 else ():
            if pp == 1 or stage == 1:
                yield plain.but(zero=stage)


def _show(verdict: Verdict, alone: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    mark = "[green]equivalent[/]" if verdict.equivalent else "[red]NOT equivalent[/]"
    if verdict.refusal:
        console.print(f"{verdict.plan:36} [yellow]refused[/]: {verdict.refusal}")
        return
    if not alone:
        largest = max(each.deviation for each in verdict.worst)
        console.print(f"{verdict.plan:36} {mark}  worst deviation {largest:.1e}")
    else:
        table = Table(title=f"plan {verdict.plan}", title_justify="left")
        for column in ("kind", "tensors", "worst deviation", "of"):
            table.add_column(column, justify="right" if column in ("tensors", "worst deviation") else "left")
        for each in verdict.worst:
            shown = "bit for bit" if each.deviation == 0 else f"{each.deviation:.1e}"
            table.add_row(each.kind, str(each.compared), shown, each.name)
        console.print(table)
        console.print(mark)
    if verdict.parting:
        console.print(f"  first parting: {verdict.parting}")
    if verdict.guess:
        console.print(f"  looks like: {verdict.guess}")
