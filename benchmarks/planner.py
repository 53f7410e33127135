"""Does the planner choose well, and does it know how long a step takes?

    python benchmarks/planner.py [--hardware here.toml] [--tasks gpt,mlp] [--steps 4] [--json out.json]

For each task, every plan for two ranks on this machine (gloo, one thread each) that the task can run under is predicted
by a replay, as `Engine(plan="auto")` does it, and then measured, in processes of their own. Processes have a few plans
each: with all of them in one, the memory that a step gets is in pieces, as it is in no training. All processes come
twice, the second time in reverse, so that other jobs on the machine disturb few plans only in part. After warm-up,
plans take turns; in a turn a plan does a step that finds the caches as another plan left them, and then two that count.
Its time is the median of those, each as long as its slowest rank. Before that, two ranks choose a plan as
`Engine(plan="auto")` does, race included. Gates: the chosen plan is at most 3% slower than the fastest of all that were
measured; predictions are within 15% for nine of ten plans, and within 25% for all. Without --hardware the machine is
measured first.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Ranks are forked from here, and some libraries keep the number of threads that they began with.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import unisono as uni
from unisono.errors import UsageError
from unisono.mesh.random.draw import draw_fast
from unisono.plan.hardware.spec import Hardware
from unisono.plan.hardware.toml import read_hardware, write_hardware
from unisono.plan.plan import Plan
from unisono.planner.auto import choose
from unisono.planner.choice import Choice, Job
from unisono.planner.measure.machine import HARDWARE, measure
from unisono.planner.planner import Planner
from unisono.planner.replay import replay

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, Config

RANKS = 2
WARM_UP = 1
COUNTED = 2  # steps of a turn
TOGETHER = 4  # plans of a process
REGRET = 0.03
ERROR, MOST, ALL = 0.15, 0.9, 0.25  # predictions: within ERROR for MOST plans, and within ALL for all


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _gpt(config: Config, batch: int, name: str) -> uni.Task:
    def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = torch.randint(config.vocabulary, (batch, config.context + 1), generator=generator)
        return made[:, :-1], made[:, 1:]

    rules = {
        "blocks.*.attention": "heads:heads",
        "blocks.*.attention.qkv": "column:qkv",
        "blocks.*.attention.out": "row",
        "blocks.*.fc1": "column",
        "blocks.*.fc2": "row",
    }
    return uni.Task(lambda: GPT(config), _token_loss, _adam, tokens, rules=rules, name=name)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MLP(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(_Residual(width) for _ in range(depth))
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _mlp(width: int, depth: int, batch: int, name: str, optimizer: Any = _adam) -> uni.Task:
    def vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 64, generator=generator), torch.randint(10, (batch,), generator=generator)

    rules = {"blocks.*.up": "column", "blocks.*.down": "row"}
    return uni.Task(lambda: MLP(width, depth), F.cross_entropy, optimizer, vectors, rules=rules, name=name)


TASKS: dict[str, uni.Task] = {
    task.name: task
    for task in (
        _gpt(Config(256, 128, 128, 4, 4), 8, "gpt"),
        _gpt(Config(256, 64, 256, 8, 4), 2, "gpt-wide"),
        _gpt(Config(256, 512, 64, 4, 4), 4, "gpt-long"),
        _gpt(Config(4096, 64, 128, 4, 2), 16, "gpt-vocabulary"),
        _gpt(Config(256, 32, 64, 4, 8), 32, "gpt-deep"),
        _gpt(Config(256, 64, 128, 4, 4, dropout=0.1), 8, "gpt-dropout"),
        _mlp(256, 4, 256, "mlp"),
        _mlp(512, 4, 16, "mlp-heavy"),  # many parameters, few samples: gradients are most of what travels
        _mlp(64, 8, 2048, "mlp-light"),
        _mlp(512, 2, 64, "mlp-sgd", lambda parameters: torch.optim.SGD(parameters, lr=1e-3)),
    )
}


def plans() -> list[Plan]:
    """All plans for two ranks that differ in more than what two ranks cannot feel."""
    found = [Plan(dp=2, zero=zero) for zero in (0, 1, 2, 3)]
    found += [Plan(dp=2, microbatches=2), Plan(dp=2, recompute="full"), Plan(dp=2, recompute="selective")]
    found += [Plan(tp=2), Plan(tp=2, sequence=True), Plan(tp=2, microbatches=2)]
    found += [Plan(cp=2), Plan(cp=2, context="ulysses"), Plan(cp=2, zero=1)]
    for m in (1, 2, 4, 8):
        found.append(Plan(pp=2, microbatches=m))
    found += [Plan(pp=2, microbatches=4, schedule="interleaved", chunks=2), Plan(pp=2, microbatches=4, schedule="zb1p")]
    found += [Plan(pp=2, microbatches=4, schedule="zbv", chunks=2)]
    return found


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def _job(name: str) -> Job:
    task = TASKS[name]
    return Job(task.model, task.loss, task.optimizer, task.batch(0), task.rules)


def chosen(name: str) -> Choice:
    """As Engine(plan="auto") chooses."""
    torch.set_num_threads(1)
    draw_fast()
    choice = choose(_job(name), uni.init(), torch.device("cpu"), {})
    uni.shutdown()
    return choice


def predicted(name: str, texts: list[str], hardware: Hardware) -> dict[str, float]:
    """Seconds by replays."""
    torch.set_num_threads(1)
    draw_fast()
    found = replay([Plan.parse(text) for text in texts], _job(name), uni.init(), torch.device("cpu"), hardware, {})
    uni.shutdown()
    return {text: each.seconds for text, each in zip(texts, found, strict=True) if each.seconds is not None}


def timed(name: str, texts: list[str], steps: int) -> dict[str, list[float]]:
    """Seconds of each plan's steps on this rank; plans that are refused are left out."""
    torch.set_num_threads(1)
    draw_fast()
    comm = uni.init()
    task = TASKS[name]
    batch = task.batch(0)
    trainers: dict[str, Any] = {}
    for text in texts:
        try:
            trainers[text] = uni.parallelize(
                task.model, text, loss=task.loss, optimizer=task.optimizer, example=batch, rules=task.rules
            )
        except UsageError:
            continue
    gc.collect()
    gc.freeze()  # a plan's steps are not to search the objects of all the others
    times: dict[str, list[float]] = {text: [] for text in trainers}
    for number in range(-WARM_UP, steps):
        for text, trainer in trainers.items():
            trainer.step(batch)
            for _ in range(COUNTED if number >= 0 else 0):
                comm.barrier()
                start = time.perf_counter()
                trainer.step(batch)
                times[text].append(time.perf_counter() - start)
        gc.collect()
    uni.shutdown()
    return times


def measured(name: str, texts: list[str], steps: int) -> dict[str, float]:
    groups = [texts[first : first + TOGETHER] for first in range(0, len(texts), TOGETHER)]
    slowest: dict[str, list[float]] = {}
    for group in (*groups, *reversed(groups)):
        ranks = uni.spawn(timed, RANKS, "gloo", (name, group, steps))
        for text in ranks[0]:
            slowest.setdefault(text, []).extend(map(max, *(rank[text] for rank in ranks)))
    return {text: statistics.median(taken) for text, taken in slowest.items()}


# ---- the verdict -----------------------------------------------------------------------------------------------------


def judge(name: str, hardware: Hardware, steps: int) -> dict[str, Any]:
    search = Planner(TASKS[name], hardware).search(RANKS)
    choice = uni.spawn(chosen, RANKS, "gloo", (name,))[0]
    raced = [lap.plan for lap in choice.race if lap.measured is not None]
    texts = list(dict.fromkeys([*(str(plan) for plan in plans() if search.refusal(plan) is None), *raced]))
    groups = [texts[first : first + TOGETHER] for first in range(0, len(texts), TOGETHER)]
    foretold: dict[str, float] = {}
    for group in groups:
        foretold |= uni.spawn(predicted, RANKS, "gloo", (name, group, hardware))[0]
    took = measured(name, list(foretold), steps)
    fastest = min(took, key=lambda text: took[text])
    return {
        "task": name,
        "plans": {
            text: {"predicted": foretold[text], "measured": took[text]}
            for text in sorted(took, key=foretold.__getitem__)
        },
        "chosen": str(choice.plan),
        "fastest": fastest,
        "regret": took[str(choice.plan)] / took[fastest] - 1,
        "median_error": statistics.median(abs(foretold[text] / took[text] - 1) for text in took),
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table("task", "plans", "chosen", "fastest", "slower by", "predicted", "measured", "error", "median error")
    for each in results:
        times = each["plans"][each["chosen"]]
        table.add_row(
            each["task"],
            str(len(each["plans"])),
            each["chosen"],
            each["fastest"],
            f"{each['regret']:.1%}",
            f"{times['predicted'] * 1e3:.1f} ms",
            f"{times['measured'] * 1e3:.1f} ms",
            f"{times['predicted'] / times['measured'] - 1:+.0%}",
            f"{each['median_error']:.0%}",
        )
    Console(highlight=False, width=140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", type=Path, help="a file that `unisono bench hardware` made here")
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: all")
    parser.add_argument("--steps", type=int, default=4, help="turns of every plan, each time")
    parser.add_argument("--verbose", action="store_true", help="show every plan")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unknown = [name for name in options.tasks.split(",") if name not in TASKS]
    if unknown or options.steps < 1:
        parser.error(f"--tasks takes {', '.join(TASKS)}, and --steps at least 1")
    if options.hardware is None:
        hardware = measure(RANKS, "gloo")
    else:
        hardware = read_hardware(options.hardware)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(write_hardware(hardware))
        file.flush()
        os.environ[HARDWARE] = file.name  # for ranks that choose
        return _run(options, hardware)


def _run(options: argparse.Namespace, hardware: Hardware) -> int:
    results = []
    for name in options.tasks.split(","):
        results.append(judge(name, hardware, options.steps))
        if options.verbose:
            print(name, flush=True)
            for text, times in results[-1]["plans"].items():
                print(f"  {text:50} {times['predicted'] * 1e3:9.1f} {times['measured'] * 1e3:9.1f}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    show(results)
    late = [each["task"] for each in results if each["regret"] > REGRET]
    errors = {
        f"{text} of {each['task']}": times["predicted"] / times["measured"] - 1
        for each in results
        for text, times in each["plans"].items()
    }
    wrong = {plan: error for plan, error in errors.items() if abs(error) > ERROR}
    rms = statistics.fmean(error**2 for error in errors.values()) ** 0.5
    within = 1 - len(wrong) / len(errors)
    print(f"chosen plan more than {REGRET:.0%} slower than the fastest: {', '.join(late) or 'none'}")
    print(f"{len(errors)} plans, rms error {rms:.1%}, median {statistics.median(errors.values()):+.1%}")
    off = ", ".join(f"{plan} ({error:+.0%})" for plan, error in wrong.items())
    print(f"within {ERROR:.0%}: {within:.1%}; off: {off or 'none'}")
    return 1 if late or within < MOST or any(abs(error) > ALL for error in errors.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
