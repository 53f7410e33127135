"""This machine measured thoroughly, in processes of its own: `unisono bench hardware`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from unisono.comm.rendezvous import world
from unisono.launch.spawn import spawn
from unisono.plan.hardware.spec import Hardware
from unisono.planner.measure.calibration import calibrated
from unisono.planner.measure.figures import hardware_of
from unisono.planner.measure.links import BRIEF, Care
from unisono.planner.measure.machine import measured, merged
from unisono.planner.measure.overheads import around_steps, overheads
from unisono.planner.measure.zero_copies import copy_rates, steps_with_zero


class _Rounds(NamedTuple):
    """How often what is not timed by a `Care` is done."""

    around_steps: int
    overheads: int
    trained: int
    with_zero: int


_MANY, _FEW = _Rounds(30, 15, 40, 15), _Rounds(8, 3, 8, 4)


def measure(ranks: int = 2, backend: str | None = None, brief: bool = False) -> Hardware:
    """The hardware that `ranks` ranks on this machine are, or its GPU."""
    is_gpu = torch.cuda.is_available()
    rounds = _FEW if brief else _MANY
    figures = merged(spawn(_on_rank, 1 if is_gpu else ranks, backend, (is_gpu, brief)))
    if not is_gpu:
        figures |= spawn(_host_overheads, 1, None, (rounds.overheads,))[0]
        figures |= calibrated(hardware_of(figures, ranks, is_gpu), ranks, backend, rounds.trained)._asdict()
        if ranks > 1:
            with_zero = spawn(_with_zero, ranks, backend, (rounds.with_zero,))
            figures |= copy_rates(hardware_of(figures, ranks, is_gpu), with_zero)
    return hardware_of(figures, ranks, is_gpu)


def _host_overheads(rounds: int) -> dict[str, Any]:
    """What a process takes for each parameter, beside its ops."""
    torch.set_num_threads(1)
    found = overheads(torch.device("cpu"), rounds)
    return {name: found[name] for name in ("gradient", "parameter", "message", "split", "recompute")}


def _with_zero(count: int) -> list[list[float]]:
    """On a rank: seconds of steps with ZeRO and without."""
    torch.set_num_threads(1)
    comm = world.init()
    try:
        return steps_with_zero(comm, count)
    finally:
        world.shutdown()


def _on_rank(is_gpu: bool, brief: bool) -> dict[str, Any]:
    care, rounds = (BRIEF, _FEW) if brief else (Care(), _MANY)
    if is_gpu:
        return measured_gpu(care, rounds)
    torch.set_num_threads(1)
    comm = world.init()
    try:
        device = torch.device("cpu")
        return measured(comm, device, care) | around_steps(device, rounds.around_steps)
    finally:
        world.shutdown()


def measured_gpu(care: Any = None, rounds: _Rounds = _MANY) -> dict[str, Any]:
    """The figures of this process's GPU. Links are not measured."""
    device = torch.device("cuda")
    with world.simulated(0, 1) as comm:
        figures = measured(comm, device, care)
    return figures | overheads(device, rounds.overheads)
