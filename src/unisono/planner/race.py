"""The race: the plans with the best predictions take a few real training steps each, and the fastest is chosen.

Predictions rank plans well but not perfectly; a measured step is right whatever the model's error. Every entrant gets a
fresh copy of the model, its own optimizer and the first batch. First each rank rehearses its part with simulated
communication, where a plan that is refused, fails or runs out of memory on some rank blocks no other; then all ranks
time real steps. The time of a step is that of its slowest rank, and of a plan the median of its steps. Nothing of the
race is left behind: random numbers, Python state that user code can reach, and the user's module are as before.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.apply import parallelize
from unisono.parallel.inputs import cloned
from unisono.parallel.meta.meta_tensors import deep_copy
from unisono.plan.plan import Plan
from unisono.planner.auto import Choice, Job, Lap
from unisono.simulate.rank import simulated_trainer

ENTRANTS = 5
_AT_LEAST = 3  # entrants; further ones only where they are predicted to be not much slower than the best
_MUCH_SLOWER = 1.5
_STEPS = 3  # that count, after one to warm up; one only where that took long
_LONG = 10.0  # seconds

Found = TypeVar("Found")


def race(choices: Sequence[Choice], job: Job, comm: Communicator, device: torch.device, options: Any) -> Choice:
    """The fastest of the choices by measurement, with the times of all; every rank calls it and has the same answer.

    options: further arguments of `parallelize`. Where no entrant finishes, the first choice: training will say why."""
    best = choices[0]
    if len(choices) < 2 or best.plan == Plan():  # nothing is faster than one device that does nothing else
        return best
    limit = _MUCH_SLOWER * (best.seconds or 0.0)
    entrants = [each for place, each in enumerate(choices) if place < _AT_LEAST or (each.seconds or 0.0) <= limit]
    laps: list[Lap] = []
    gpus = [device] if device.type == "cuda" else []
    with warnings.catch_warnings(), no_side_effects(job.model, job.loss, job.optimizer), torch.random.fork_rng(gpus):
        warnings.simplefilter("ignore")  # the chosen plan warns again
        for each in entrants:
            seconds, reason = _measured(each.plan, job, comm, device, options)
            laps.append(Lap(str(each.plan), each.seconds or 0.0, seconds, reason))
    finished = [place for place, lap in enumerate(laps) if lap.measured is not None]
    fastest = min(finished, key=lambda place: laps[place].measured or 0.0, default=0)
    return replace(entrants[fastest], race=laps)


def _measured(
    plan: Plan, job: Job, comm: Communicator, device: torch.device, options: dict[str, Any]
) -> tuple[float | None, str]:
    """Seconds of a step, or the reason why there are none; the same on all ranks."""
    _, reason = _on_all(comm, lambda: _rehearse(plan, job, comm, device, options))
    if reason:
        return None, reason
    taken, reason = _on_all(comm, lambda: _steps(plan, job, comm, device, options))
    if reason:
        return None, reason
    return statistics.median(map(max, zip(*taken, strict=True))), ""


def _on_all(comm: Communicator, call: Callable[[], Found]) -> tuple[list[Found], str]:
    """What the call gave on each rank, and the first error of any."""
    mine: Found | None = None
    error = ""
    try:
        mine = call()
    except Exception as raised:  # whatever fails under one plan need not under another, and training would show it
        error = _reason(raised)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found: list[tuple[Any, str]] = comm.all_gather_object((mine, error))
    failed = next((f"rank {rank}: {error}" for rank, (_, error) in enumerate(found) if error), "")
    return [value for value, _ in found], failed


def _reason(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
        return f"out of memory ({first})"
    return first or type(error).__name__


def _fresh(job: Job, device: torch.device) -> Any:
    """As much on the device as in training, where the user's module itself is there."""
    return deep_copy(job.model).to(device) if isinstance(job.model, nn.Module) else job.model


def _loss(job: Job) -> Any:
    return deep_copy(job.loss) if isinstance(job.loss, nn.Module) else job.loss


def _rehearse(plan: Plan, job: Job, comm: Communicator, device: torch.device, options: dict[str, Any]) -> None:
    """Two steps of this rank's part without the others: the second has the optimizer's state."""
    copied = replace(job, model=_fresh(job, device), loss=_loss(job))
    with simulated_trainer(copied.task(), plan, comm.rank, cloned(job.example), options) as trainer:
        for _ in range(2):
            trainer.step(cloned(job.example))


def _steps(plan: Plan, job: Job, comm: Communicator, device: torch.device, options: dict[str, Any]) -> list[float]:
    trainer = parallelize(
        _fresh(job, device), plan, loss=_loss(job), optimizer=job.optimizer, example=job.example, rules=job.rules,
        batch_dim=job.batch_dim, **options,
    )  # fmt: skip

    def step() -> float:
        batch = cloned(job.example)
        comm.barrier()
        start = time.perf_counter()
        trainer.step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    first = max(comm.all_gather_object(step()))
    return [step() for _ in range(_STEPS if first < _LONG else 1)]
