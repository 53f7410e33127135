"""Predictions for a run before it begins: the best plans, and what a step under a plan takes.

The machine is the one that a hardware file describes, where the variable UNISONO_HARDWARE names one; else the ranks
measure it briefly, all together. Rank 0 plans for all, so that all have one plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from unisono.comm.communicator import Communicator
from unisono.errors import UnisonoError, UsageError
from unisono.graph.program.program import Model
from unisono.parallel.loss.loss import Loss
from unisono.parallel.share import BatchDim
from unisono.parallel.task import Task
from unisono.plan.hardware.spec import Hardware
from unisono.plan.hardware.toml import read_hardware
from unisono.plan.plan import Plan
from unisono.plan.search.search import Candidate, Search
from unisono.plan.search.why_not import why_not
from unisono.planner.measure.brief import measured_briefly
from unisono.planner.planner import Planner
from unisono.simulate.sketch import without_memory

HARDWARE = "UNISONO_HARDWARE"  # a hardware file, as `unisono bench hardware` writes it


class Lap(NamedTuple):
    """An entrant of a race (race.py)."""

    plan: str
    predicted: float  # seconds of a step
    measured: float | None
    reason: str = ""  # why there is no measurement


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
    race: list[Lap] = field(default_factory=list)  # of all plans that took real steps

    def about(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "plan"}

    def __str__(self) -> str:
        if self.note:
            return f"plan {self.plan} ({self.note})"
        return "\n".join([self.summary(), *(f"  not {change}: {reason}" for change, reason in self.why)])

    def summary(self) -> str:
        """Without reasons: the plan with its prediction, and the table of the race."""
        if self.note:
            return str(self)
        line = f"plan {self.plan}: {1000 * (self.seconds or 0):.1f} ms a step, {(self.memory or 0) / 2**20:.0f} MiB"
        if not self.race:
            return line
        rows = [("plan", "predicted", "measured")]
        for plan, predicted, measured, reason in self.race:
            result = reason if measured is None else f"{1000 * measured:.1f} ms"
            rows.append((plan, f"{1000 * predicted:.1f} ms", result))
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

    def task(self) -> Task:
        model = self.model
        build = model if not isinstance(model, torch.nn.Module) else lambda: model
        return Task(build, self.loss, self.optimizer, lambda seed: self.example, self.rules, batch_dim=self.batch_dim)


def choice_for(job: Job, comm: Communicator, device: torch.device, plan: Plan | None = None) -> Choice:
    """What is predicted of a plan, or of the best one where none is given; every rank calls it."""
    return choices_for(job, comm, device, plan, 1)[0]


def choices_for(
    job: Job, comm: Communicator, device: torch.device, plan: Plan | None = None, top: int = 1
) -> list[Choice]:
    """The best plans by prediction, the best first, or the plan that is given; every rank calls it.

    A job that cannot be traced shares its batch, and nothing is predicted of it.
    """
    hardware = _hardware(job, comm, device)
    found: list[Choice] | UsageError | None = None
    if comm.rank == 0:
        found = _planned(job, comm.size, hardware, plan, top)
    found = comm.broadcast_object(found)
    if isinstance(found, UsageError):
        raise found
    assert found is not None
    return found


def _planned(job: Job, world: int, hardware: Hardware, plan: Plan | None, top: int) -> list[Choice] | UsageError:
    try:
        search = Planner(job.task(), hardware).search(world)
    except _UNPREDICTABLE as error:
        return [_unpredicted(plan or Plan(dp=world), error)]
    try:
        if plan is not None:
            return [_choice(search, search.judged(plan, played=True), with_reasons=False)]
        best = {str(each.plan): each for each in search.run(top).candidates}
        return [_choice(search, each, with_reasons=True) for each in best.values()]
    except _UNPREDICTABLE as error:  # the cost model may not cover a plan given by hand; rank 0 must not fail alone
        if plan is None and isinstance(error, UsageError):
            return error
        return [_unpredicted(plan or Plan(dp=world), error)]


def _unpredicted(plan: Plan, error: Exception) -> Choice:
    return Choice(plan, note=f"not predicted: {str(error).splitlines()[0]}")


_UNPREDICTABLE = (UnisonoError, RuntimeError, TypeError, ValueError)


def _choice(search: Search, best: Candidate, with_reasons: bool) -> Choice:
    reasons = why_not(search, best) if with_reasons else []
    stages = search.stages(best.plan)
    return Choice(
        best.plan,
        best.seconds,
        int(best.footprint.total),
        best.footprint.parts(),
        [search.memory.of_rank(best.plan, stages, rank).parts() for rank in range(best.plan.pp)],
        [(rejected.change, rejected.reason) for rejected in reasons],
    )


def _hardware(job: Job, comm: Communicator, device: torch.device) -> Hardware:
    path = os.environ.get(HARDWARE)
    if path:
        return read_hardware(path)
    with torch.random.fork_rng([]):  # what the user draws afterwards is as if nothing had been measured
        return measured_briefly(comm, device, with_dropout=comm.broadcast_object(comm.rank == 0 and _has_dropout(job)))


def _has_dropout(job: Job) -> bool:
    """Whether some module is one, or has a probability of one for what it calls."""
    try:
        model = without_memory(job.task())
    except _UNPREDICTABLE:
        return False
    modules = list(model.modules())
    return any(
        isinstance(value, float) and value > 0 and (name == "p" or "drop" in name)
        for module in modules
        for name, value in vars(module).items()
    )
