"""plan="auto": the plan that the engine takes when the user gives none."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.apply import Model
from unisono.parallel.loss import Loss
from unisono.plan.hardware import Hardware
from unisono.plan.measure import BRIEF, measured, merged, written
from unisono.plan.plan import Plan
from unisono.train.planning import Planner
from unisono.train.task import Task

HARDWARE = "UNISONO_HARDWARE"  # a hardware file; without, the machine is measured for a few seconds


@dataclass(frozen=True)
class Choice:
    """A plan, and what is expected of it."""

    plan: Plan
    seconds: float | None = None  # a step
    memory: int | None = None  # bytes a rank
    told: str = ""

    def about(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "memory": self.memory, "told": self.told}


def choose(
    model: Model,
    loss: Loss,
    optimizer: Callable[[Any], Optimizer],
    example: tuple[Any, Any],
    comm: Communicator,
    rules: Any,
) -> Choice:
    """The fastest plan that fits; where the model cannot be traced, all ranks share the batch. Every rank calls it."""
    if comm.size == 1:
        return Choice(Plan())
    hardware = _hardware(comm)
    chosen = None
    if comm.rank == 0:
        task = Task(lambda: _fresh(model), loss, optimizer, lambda seed: example, rules, name="auto")
        chosen = _searched(task, comm.size, hardware)
    found = comm.broadcast_object(chosen)
    assert found is not None
    return found


def _searched(task: Task, world: int, hardware: Hardware) -> Choice:
    try:
        best = Planner(task, hardware).search(world).run(top=1)
    except UsageError as error:
        return Choice(Plan(dp=world), told=f"all ranks share the batch, because no plan was found: {error}")
    told = f"the fastest of {best.considered} plans that were considered"
    return Choice(best.best.plan, best.best.seconds, int(best.best.footprint.total), told)


def _fresh(model: Model) -> nn.Module:
    if isinstance(model, nn.Module):
        return copy.deepcopy(model).to("meta")
    return model()


def _hardware(comm: Communicator) -> Hardware:
    path = os.environ.get(HARDWARE)
    if path:
        return Hardware.read(path)
    figures = comm.all_gather_object(measured(comm, comm.device, BRIEF))
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(written(merged(figures), comm.size, comm.device.type == "cuda"))
        file.flush()
        return Hardware.read(file.name)
