"""Effect of SCHED_BATCH for gloo's threads on the time of a step (src/unisono/launch/process_threads.py).

    python benchmarks/gloo_scheduling.py [--task gpt-deep] [--plans "dp=2;tp=2;cp=2"] [--rounds 8] [--others 0]

Two ranks on this machine, gloo, one thread each, with the tasks of benchmarks/planner.py. In every round each plan does
its steps twice: with all threads of the rank under Linux's default policy, and with gloo's under SCHED_BATCH, as
`uni.init` sets it. `--others` busy programs run beside the ranks. A time is the median of the steps, each of its slower
rank; a ratio below 1 means that SCHED_BATCH is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import unisono as uni
from unisono.launch import process_threads

sys.path.insert(0, str(Path(__file__).resolve().parent))
from planner import TASKS

RANKS = 2
COUNTED = 2  # steps of a turn, after one that does not count
POLICIES = ("default", "turns")
Times = dict[tuple[str, str], list[float]]  # by plan and policy


def _put_under(policy: str) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
    if policy == "turns":
        process_threads.batch_schedule_gloo_threads()


def race(name: str, plans: list[str], rounds: int) -> Times:
    torch.set_num_threads(1)
    comm = uni.init()
    task = TASKS[name]
    batch = task.batch(0)
    trainers = {
        plan: uni.parallelize(
            task.model, plan, loss=task.loss, optimizer=task.optimizer, example=batch, rules=task.rules
        )
        for plan in plans
    }
    times: Times = {(plan, policy): [] for plan in plans for policy in POLICIES}
    for _ in range(rounds):
        for plan, trainer in trainers.items():
            for policy in POLICIES:
                _put_under(policy)
                trainer.step(batch)
                for _ in range(COUNTED):
                    comm.barrier()
                    start = time.perf_counter()
                    trainer.step(batch)
                    times[plan, policy].append(time.perf_counter() - start)
    uni.shutdown()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="gpt-deep", choices=list(TASKS))
    parser.add_argument("--plans", default="dp=2;dp=2,zero=2;dp=2,zero=3;tp=2;tp=2,sp;cp=2;cp=2,context=ulysses")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--others", type=int, default=0)
    chosen = parser.parse_args()
    plans = chosen.plans.split(";")
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(chosen.others)]
    try:
        ranks = uni.spawn(race, RANKS, "gloo", (chosen.task, plans, chosen.rounds))
    finally:
        for other in others:
            other.kill()
    for plan in plans:
        slower = {policy: list(map(max, *(rank[plan, policy] for rank in ranks))) for policy in POLICIES}
        medians = {policy: statistics.median(steps) for policy, steps in slower.items()}
        ratios = [quicker / default for default, quicker in zip(slower["default"], slower["turns"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        reported = ", ".join(f"{policy} {1e3 * seconds:.1f} ms" for policy, seconds in medians.items())
        print(f"{chosen.task} {plan}: {reported}, ratio {middle:.3f} ({low:.3f} to {high:.3f})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
