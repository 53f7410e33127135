"""What is planned for, and what was chosen: a job, and a plan with its prediction and the race that it won."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from unisono.amounts import format_bytes, format_seconds
from unisono.comm.signatures.records import plain_record
from unisono.graph.program.program import Model
from unisono.parallel.loss.loss import Loss
from unisono.parallel.share import BatchDim
from unisono.parallel.task import Task
from unisono.plan.plan import Plan


@plain_record
class Lap(NamedTuple):
    """An entrant of a race (race.py)."""

    plan: str
    predicted: float | None  # seconds of a step
    measured: float | None
    reason: str = ""  # why there is no measurement


@plain_record
@dataclass(frozen=True)
class Choice:
    """A plan, and what is predicted of it."""

    plan: Plan
    seconds: float | None = None  # a step
    memory: int | None = None  # bytes on the rank that needs most
    memory_by_kind: dict[str, float] = field(default_factory=dict)  # on that rank
    memory_by_stage: list[dict[str, float]] = field(default_factory=list)  # by kind, on each rank of the pipeline
    why: list[tuple[str, str]] = field(default_factory=list)  # neighbours, and what each lacks
    note: str = ""  # why nothing is predicted
    reason: str = ""  # why it cannot run, as its replay showed
    flops: float | None = None  # of a forward on one sample
    race: list[Lap] = field(default_factory=list)  # of plans that took real steps, or were to

    def about(self) -> dict[str, Any]:
        """All but the plan, for a JSON file; `recalled` reads it again."""
        return {name: value for name, value in asdict(self).items() if name != "plan"}

    @classmethod
    def recalled(cls, plan: Plan, about: dict[str, Any]) -> Choice:
        return cls(plan, **{**about, "race": [Lap(*lap) for lap in about.get("race", [])]})

    def __str__(self) -> str:
        if self.note:
            return f"plan {self.plan} ({self.note})"
        return "\n".join([self.summary(), *(f"  not {change}: {reason}" for change, reason in self.why)])

    def summary(self) -> str:
        """Without reasons: the plan with its prediction, and the table of the race."""
        if self.note:
            return str(self)
        measured = next((lap.measured for lap in self.race if lap.plan == str(self.plan)), None)
        seconds = measured or self.seconds
        time = "no prediction" if seconds is None else f"{format_seconds(seconds)} a step"
        line = f"plan {self.plan}: {time}, {format_bytes(self.memory or 0)}"
        if not self.race:
            return line
        rows = [("plan", "predicted", "measured")]
        for plan, predicted, measured, reason in self.race:
            result = reason if measured is None else format_seconds(measured)
            rows.append((plan, "" if predicted is None else format_seconds(predicted), result))
        width = max(len(row[0]) for row in rows)
        return "\n".join([line, *(f"  {plan:{width}}  {first:>10}  {second:>10}" for plan, first, second in rows)])


@dataclass(frozen=True)
class Job:
    """What an engine trains."""

    model: Model
    loss: Loss
    optimizer: Callable[[Any], Optimizer]
    example: tuple[Any, Any]
    rules: Any = None
    batch_dim: BatchDim = 0
    clip: float | None = None
    precision: Any = "fp32"
    compile: bool = False  # whether plans are to be compiled
    cudagraph: bool = False  # whether steps are to be a CUDA graph

    def task(self) -> Task:
        model = self.model
        build = model if not isinstance(model, torch.nn.Module) else lambda: model
        return Task(
            build, self.loss, self.optimizer, lambda seed: self.example, self.rules, self.clip,
            batch_dim=self.batch_dim, precision=self.precision,
        )  # fmt: skip
