"""Dry run: peak memory and time of a step of one rank of a plan, with simulated communication (rank.py)."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from unisono.amounts import format_bytes, format_seconds
from unisono.launch.spawn import spawn
from unisono.parallel.task import Task, load_task
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan
from unisono.simulate.memory_meter import Meter
from unisono.simulate.rank import build_trainer, on_device, resized, simulated_mesh, state_of


@dataclass(frozen=True)
class DryRun:
    """What a step takes on one rank."""

    rank: int
    plan: str
    device: str
    peak: float  # bytes, of a step
    state: float  # bytes of parameters and optimizer state
    seconds: float  # of a step, without communication

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"dry run of rank {self.rank} of {self.plan} on {self.device}: peak {format_bytes(self.peak)}, "
            f"model state {format_bytes(self.state)}, {format_seconds(self.seconds)} a step, communication left out"
        )


def dry_run(task: Task | str, plan: Plan, rank: int, batch: int | None = None, steps: int = 3) -> DryRun:
    """Run a rank of the plan in a process of its own."""
    found: DryRun = spawn(_on_its_own, 1, None, (task, str(plan), rank, batch, steps))[0]
    return found


def _on_its_own(task: Task | str, plan: str, rank: int, batch: int | None, steps: int) -> DryRun:
    return run_here(load_task(task) if isinstance(task, str) else task, Plan.parse(plan), rank, batch, steps)


def run_here(task: Task, plan: Plan, rank: int, batch: int | None = None, steps: int = 3) -> DryRun:
    """The same in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with simulated_mesh(plan, rank) as mesh:
        with Meter(device) as meter:
            given = on_device(resized(task.batch(0), batch, task.batch_dim), device)
            trainer = build_trainer(task, plan, mesh, given, device)
            trainer.step(given)  # the optimizer makes its state
            gc.collect()
            meter.restart()
            trainer.step(given)
        seconds = [_timed(trainer, given, device) for _ in range(steps)]
        name = torch.cuda.get_device_name() if device.type == "cuda" else "this CPU"
        return DryRun(rank, str(plan), name, meter.peak, state_of(trainer), sorted(seconds)[len(seconds) // 2])


def _timed(trainer: Trainer, given: Any, device: torch.device) -> float:
    start = time.perf_counter()
    trainer.step(given)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
