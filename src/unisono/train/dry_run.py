"""A dry run: one rank of a big job, executed here, with communication simulated.

torch's "fake" process group takes part in every collective at once and brings nothing, so one process can be any rank
of any world: its shapes, its memory and its computing are real, its numbers are not. The model is built without memory,
and gets some for what the plan leaves this rank.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unisono.comm import world
from unisono.errors import UsageError
from unisono.launch.spawn import spawn
from unisono.mesh.mesh import Mesh
from unisono.mesh.random import RandomState
from unisono.parallel.apply import applied, refuse_what_cannot_be_right
from unisono.parallel.share import rows_of
from unisono.parallel.tensor import fitting_rules, require_shareable
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import AXES, Plan
from unisono.train.task import Task, load_task


@dataclass(frozen=True)
class DryRun:
    """What one rank took."""

    rank: int
    plan: str
    device: str
    peak: float  # bytes, at most in a step
    state: float  # bytes of parameters and optimizer state
    seconds: float  # of a step's computing

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"dry run of rank {self.rank} of {self.plan} on {self.device}: peak {self.peak / 2**20:.1f} MiB, "
            f"model state {self.state / 2**20:.1f} MiB, {self.seconds * 1e3:.1f} ms a step, communication left out"
        )


def dry_run(task: Task | str, plan: Plan, rank: int, batch: int | None = None, steps: int = 3) -> DryRun:
    """Run a rank of the plan in a process of its own."""
    found: DryRun = spawn(_on_its_own, 1, None, (task, str(plan), rank, batch, steps))[0]
    return found


def _on_its_own(task: Task | str, plan: str, rank: int, batch: int | None, steps: int) -> DryRun:
    return run_here(load_task(task) if isinstance(task, str) else task, Plan.parse(plan), rank, batch, steps)


def run_here(task: Task, plan: Plan, rank: int, batch: int | None = None, steps: int = 3) -> DryRun:
    """The same in this process, which must not have joined a world."""
    if not 0 <= rank < plan.world:
        raise UsageError(f"rank {rank} of plan {plan}: expected one of 0 to {plan.world - 1}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with world.simulated(rank, plan.world):
        mesh = Mesh(plan.shape, AXES)
        if mesh.index("pp"):
            raise UsageError(
                f"rank {rank} is in stage {mesh.index('pp')} of the pipeline: it would learn the form of its "
                "input from the stage before, which is not there; choose one of the first stage, "
                f"0 to {plan.world // plan.pp - 1}"
            )
        mesh.connect()
        meter = Meter(device)
        trainer = _built(task, plan, mesh, device)
        given = _on(_of_size(task.batch(0), batch), device)
        trainer.step(given)  # the optimizer makes its state
        gc.collect()
        meter.restart()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            trainer.step(given)
            meter.settle()
            seconds.append(time.perf_counter() - start)
        name = torch.cuda.get_device_name() if device.type == "cuda" else "this CPU"
        return DryRun(rank, str(plan), name, meter.peak(), _state(trainer), sorted(seconds)[len(seconds) // 2])


def _built(task: Task, plan: Plan, mesh: Mesh, device: torch.device) -> Trainer:
    with torch.device("meta"):
        model = task.model()
    refuse_what_cannot_be_right(plan, model)
    rules = task.rules
    if plan.tp > 1:
        rules = fitting_rules(model, plan.tp, rules, _of_size(task.batch(0), 2))
        require_shareable(model, plan.tp, rules)
    random = RandomState(0)
    random.name_modules(model)
    example = _on(_of_size(task.batch(0), plan.dp * plan.microbatches), torch.device("meta"))
    return applied(
        model, plan, mesh, random, task.loss, task.optimizer, example, rules, task.clip,
        fill=lambda made: give_memory(made, device),
    )  # fmt: skip


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device) -> None:
    """Memory for every tensor of a model that has none; parameters keep their identity, and what is written on them."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            continue
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if tensor.is_floating_point() and tensor.dim() > 1:
            made.normal_(std=0.02)
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        vars(made).update(vars(tensor))
        torch.utils.swap_tensors(tensor, made)


def _of_size(batch: Any, rows: int | None) -> Any:
    """The batch with so many samples: those it has, again and again."""
    has = rows_of(batch)
    if rows is None or rows == has:
        return batch
    places = torch.arange(rows) % has
    return pytree.tree_map(
        lambda leaf: leaf[places] if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == has else leaf, batch
    )


def _on(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _state(trainer: Trainer) -> float:
    held = sum(p.untyped_storage().nbytes() for p in trainer.model.parameters())
    kept = sum(
        value.numel() * value.itemsize
        for each in trainer.optimizer.state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    )
    return float(held + kept)


class Meter:
    """The most memory that this process has had since `restart`, beyond what it had when the meter was made."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._before = 0.0 if self._is_gpu else _resident("VmRSS")

    def restart(self) -> None:
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark falls to what is used now

    def settle(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()

    def peak(self) -> float:
        return float(torch.cuda.max_memory_allocated()) if self._is_gpu else _resident("VmHWM") - self._before


def _resident(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return float(line.split()[1]) * 1024
    return 0.0
