"""plan="auto": the plan that the engine takes when the user gives none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from unisono.comm.communicator import Communicator
from unisono.parallel.apply import Model
from unisono.parallel.loss import Loss
from unisono.plan.plan import Plan


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
    return Choice(Plan(dp=comm.size))
