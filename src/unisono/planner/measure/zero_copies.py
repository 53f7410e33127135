"""How fast ZeRO copies rows into its messages and out of them, in steps.

Copies by themselves, over and over, say too little: in a step others are on their way meanwhile, memory is that of
something else, and blocks that get their memory anew for every use wait for its pages to be mapped. So a model that is
mostly parameters is trained without ZeRO and with it, the plans in turns. What the steps differ by, beside what is
predicted of messages, optimizer and overheads, are the copies.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.parallel.apply import parallelize
from unisono.parallel.task import Task
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import Plan
from unisono.planner.planner import Planner

_WIDTH, _BETWEEN, _BLOCKS = 768, 1536, 2
_STAGES = (0, 1, 3)  # of ZeRO; the second copies what the first does
_AT_ONCE = 1e30  # bytes a second


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _BETWEEN)
        self.down = nn.Linear(_BETWEEN, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _task(ranks: int) -> Task:
    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        made = torch.randn(2 * ranks, _WIDTH, generator=drawn)
        return made, torch.zeros_like(made)

    return Task(_Model, F.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.0), batch)


def steps_with_zero(comm: Communicator, rounds: int) -> list[list[float]]:
    """Seconds on this rank of the steps of each plan; all ranks call it."""
    task = _task(comm.size)
    given = task.batch(0)
    trainers = [
        parallelize(task.model, _plan(comm.size, stage), loss=task.loss, optimizer=task.optimizer, example=given)
        for stage in _STAGES
    ]
    taken: list[list[float]] = [[] for _ in trainers]
    for _ in range(1 + rounds):
        for trainer, mine in zip(trainers, taken, strict=True):
            trainer.step(given)  # finds the caches as another plan left them
            comm.barrier()
            start = time.perf_counter()
            trainer.step(given)
            mine.append(time.perf_counter() - start)
    return [mine[1:] for mine in taken]


def copy_rates(hardware: Hardware, of_ranks: list[list[list[float]]]) -> dict[str, Any]:
    """Figures for `planner.measure.figures.hardware_of`, from the steps of all ranks."""
    ranks = len(of_ranks)
    search = Planner(_task(ranks), replace(hardware, piece_rate=_AT_ONCE, unit_rate=_AT_ONCE)).search(ranks)
    plain, *spread = (
        statistics.median(map(max, zip(*(taken[number] for taken in of_ranks), strict=True)))
        - search.judged(_plan(ranks, stage), played=True).seconds
        for number, stage in enumerate(_STAGES)
    )
    size = 4.0 * sum(parameter.numel() for parameter in _Model().parameters())
    gathered = 2 * size / ranks + 2 * size
    moved = (gathered + 2 * size, 2 * gathered + 2 * size)
    most, turns = hardware.memory_bandwidth * hardware.memory_efficiency, hardware.turns(ranks)
    rates = [
        turns * each / max(copying - plain, turns * each / most) for each, copying in zip(moved, spread, strict=True)
    ]
    return dict(zip(("piece_rate", "unit_rate"), rates, strict=True))


def _plan(ranks: int, stage: int) -> Plan:
    return Plan(dp=ranks, zero=stage)
