"""The race: the plans with the best predictions take a few real training steps each, and the fastest is chosen.

Predictions rank plans well but not perfectly; a measured step is right whatever the model's error. Every entrant gets a
fresh copy of the model, its own optimizer and the first batch. Entrants have been replayed (replay.py), so that a plan
which fails or runs out of memory on some rank does not enter; one that all ranks refuse now is dropped, and any other
error ends the job as it would in training. The time of a step is that of its slowest rank, and of a plan the median of
its steps. Nothing of the race is left behind: random numbers, Python state that user
code can reach, and the user's module are as before.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.apply import parallelize
from unisono.plan.plan import Plan
from unisono.planner.choice import Choice, Job, Lap
from unisono.planner.replay import fresh, measuring, on_all_ranks, timed_step

ENTRANTS = 5
_AT_LEAST = 3  # entrants; further ones only where they are predicted to be not much slower than the best
_SLOWER = 1.25
_STEPS = 5  # that count, after one to warm up; one only where that took long
_LONG = 5.0  # seconds


def race(choices: Sequence[Choice], job: Job, comm: Communicator, device: torch.device, options: Any) -> Choice:
    """The fastest of the choices by measurement, with the times of all; every rank calls it and has the same answer.

    options: further arguments of `parallelize`. Where no entrant finishes, the first choice: training will say why."""
    ranked = sorted((each for each in choices if not each.reason), key=lambda each: each.seconds or 0.0)
    dropped = [Lap(str(each.plan), None, None, each.reason) for each in choices if each.reason]
    if not ranked:
        return replace(choices[0], race=dropped)
    limit = _SLOWER * (ranked[0].seconds or 0.0)
    entrants = [
        each for number, each in enumerate(ranked[:ENTRANTS]) if number < _AT_LEAST or (each.seconds or 0.0) <= limit
    ]
    laps: list[Lap] = []
    with measuring(job, device):
        for each in entrants:
            taken, reason = on_all_ranks(comm, partial(_steps, each.plan, job, comm, device, options), UsageError)
            seconds = None if reason else statistics.median(map(max, zip(*taken, strict=True)))
            laps.append(Lap(str(each.plan), each.seconds, seconds, reason))
    finished = [number for number, lap in enumerate(laps) if lap.measured is not None]
    fastest = min(finished, key=lambda number: laps[number].measured or 0.0, default=0)
    return replace(entrants[fastest], race=[*laps, *dropped])


def _steps(plan: Plan, job: Job, comm: Communicator, device: torch.device, options: dict[str, Any]) -> list[float]:
    copied = fresh(job, device)
    trainer = parallelize(
        copied.model, plan, loss=copied.loss, optimizer=job.optimizer, example=job.example, rules=job.rules,
        batch_dim=job.batch_dim, **options,
    )  # fmt: skip

    def step() -> float:
        comm.barrier()
        return timed_step(trainer, job.example, device)

    try:
        if plan.compile:
            step()  # compiles
        first = max(comm.all_gather_object(step(), only_data=True))
        return [step() for _ in range(_STEPS if first < _LONG else 1)]
    except Exception as error:
        error.add_note(f'in the race of plan="auto", under {plan}; race=False and --no-race leave the race out')
        raise
