"""The machine as ranks that are about to train measure it: some seconds, all together.

Less often than `unisono bench hardware` does and with fewer messages, but all that a step of some plan is made of: what
ops take, what is around them and around each parameter, and how ops do one after another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.parallel.apply import parallelize
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import Plan
from unisono.planner.measure.calibration import Size, steps, together, usual
from unisono.planner.measure.figures import Figures, hardware_of
from unisono.planner.measure.links import BRIEF
from unisono.planner.measure.machine import measured, merged
from unisono.planner.measure.overheads import Clock, around_steps

_SIZE = Size(width=160, heads=5, layers=2, length=64, rows=4)
_STEPS = 8
_FEW, _MANY = 2, 18  # layers
_PARAMETERS = 2  # of a layer
_WIDTH = 8


def measured_briefly(comm: Communicator, device: torch.device, *, with_dropout: bool) -> Hardware:
    """What this machine is like; every rank calls it and has the same answer."""
    is_cpu = device.type == "cpu"
    taken: list[list[float]] = []  # in passes, some seconds apart: what else goes on for a while falls on one of them
    if is_cpu:
        taken.append(steps(comm, _SIZE, comm.size, _STEPS))
    mine = measured(comm, device, BRIEF, with_dropout=with_dropout)
    if is_cpu:
        mine |= around_steps(device, _STEPS) | _around_parameters(comm) | Clock(device, 5).of_backwards()
        taken.append(steps(comm, _SIZE, comm.size, _STEPS))
    of_ranks = comm.all_gather_object((mine, taken))
    figures = merged([each for each, _ in of_ranks])
    hardware = hardware_of(figures, comm.size, device.type == "cuda")
    if not is_cpu:
        return hardware
    share = 1.0
    if comm.rank == 0:
        passes = zip(*(passes for _, passes in of_ranks), strict=True)
        share = together(hardware, comm.size, [min(usual(list(one)) for one in passes)], (_SIZE,))
    return replace(hardware, together=comm.broadcast_object(share))


class _Layers(nn.Module):
    """One unit of ZeRO's third stage, however many layers there are."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        for number in range(count):
            setattr(self, f"layer{number}", nn.Linear(_WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.count):
            x = getattr(self, f"layer{number}")(x)
        return x


def _around_parameters(comm: Communicator) -> Figures:
    """Seconds that a parameter takes beside ops, by ZeRO's stage: half of them in the backward."""
    plain = (_plain(comm, _MANY) - _plain(comm, _FEW)) / (_MANY - _FEW)
    each = {}
    for zero in (0, 1, 3):
        layer = (_trained(comm, zero, _MANY) - _trained(comm, zero, _FEW)) / (_MANY - _FEW)
        each[zero] = max(layer - plain, 0.0) / _PARAMETERS
    halves = [each[min(zero, 1) if zero < 3 else 3] / 2 for zero in range(4)]
    return {"gradient": halves, "parameter": halves}


def _plain(comm: Communicator, layers: int) -> float:
    model, x = _Layers(layers), torch.ones(1, _WIDTH)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return _usually(comm, step)


def _trained(comm: Communicator, zero: int, layers: int) -> float:
    given: Any = tuple(torch.ones(comm.size, _WIDTH) for _ in range(2))
    trainer = parallelize(
        _Layers(layers),
        Plan(dp=comm.size, zero=zero if comm.size > 1 else 0),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.0),
    )
    return _usually(comm, lambda: trainer.step(given))


def _usually(comm: Communicator, step: Callable[[], object]) -> float:
    taken = []
    for _ in range(2 + _STEPS):
        comm.barrier()
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])
