"""`unisono bench hardware`: writes a hardware file for this machine."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from unisono.errors import UsageError


def add_kind(kinds: Any) -> None:
    parser = kinds.add_parser("hardware", help="measure this machine for the planner")
    add = parser.add_argument
    add("-n", "-np", dest="n", type=int, default=2, metavar="N", help="ranks that share the machine (default: 2)")
    add("--backend", choices=("gloo", "mpi"), help="default: gloo")
    add("--brief", action="store_true", help="in some seconds, for a first look: predictions are further off")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    if chosen.n < 1:
        raise UsageError(f"-n {chosen.n}: expected at least 1")
    print(measure(chosen.n, chosen.backend, chosen.brief), end="")
    return 0


class _Rounds(NamedTuple):
    """How often what is not timed by a `Care` is done."""

    around_steps: int
    overheads: int
    trained: int
    with_zero: int


_MANY, _FEW = _Rounds(30, 15, 40, 15), _Rounds(8, 3, 8, 4)


def measure(ranks: int = 2, backend: str | None = None, brief: bool = False) -> str:
    """The text of a hardware file for `ranks` ranks on this machine, or for its GPU."""
    import torch

    from unisono.launch.spawn import spawn
    from unisono.plan.hardware import Hardware
    from unisono.plan.hardware_file import written
    from unisono.plan.measure import merged
    from unisono.train.calibration import calibrated
    from unisono.train.copies import copy_rates

    is_gpu = torch.cuda.is_available()
    rounds = _FEW if brief else _MANY
    figures = merged(spawn(_on_rank, 1 if is_gpu else ranks, backend, (is_gpu, brief)))
    if not is_gpu:
        figures |= spawn(_host_overheads, 1, None, (rounds.overheads,))[0]
        alone = Hardware.parse(written(figures, ranks, is_gpu), "measured here")
        figures |= calibrated(alone, ranks, backend, rounds.trained)._asdict()
        if ranks > 1:
            known = Hardware.parse(written(figures, ranks, is_gpu), "measured here")
            figures |= copy_rates(known, spawn(_with_zero, ranks, backend, (rounds.with_zero,)))
    return written(figures, ranks, is_gpu)


def _host_overheads(rounds: int) -> dict[str, Any]:
    """What a process takes for each parameter, beside its ops."""
    import torch

    from unisono.train.overheads import overheads

    torch.set_num_threads(1)
    found = overheads(torch.device("cpu"), rounds)
    return {name: found[name] for name in ("gradient", "parameter", "message", "split", "recompute")}


def _with_zero(count: int) -> list[list[float]]:
    """On a rank: seconds of steps with ZeRO and without."""
    import torch

    from unisono.comm.rendezvous import world
    from unisono.train.copies import steps_with_zero

    torch.set_num_threads(1)
    comm = world.init()
    try:
        return steps_with_zero(comm, count)
    finally:
        world.shutdown()


def _on_rank(is_gpu: bool, brief: bool) -> dict[str, Any]:
    import torch

    from unisono.comm.rendezvous import world
    from unisono.plan.links import BRIEF, Care
    from unisono.plan.measure import measured

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
    """The figures of this process's GPU; it must not have joined a world. Links are not measured."""
    import torch

    from unisono.comm.rendezvous import world
    from unisono.plan.measure import measured
    from unisono.train.overheads import overheads

    device = torch.device("cuda")
    with world.simulated(0, 1) as comm:
        figures = measured(comm, device, care)
    return figures | overheads(device, rounds.overheads)


def around_steps(device: Any, steps: int) -> dict[str, float]:
    """Figures of what is around the ops of a step, and of each further microbatch; all ranks of the world call it."""
    step, several = _step_overhead(device, 1, steps), _step_overhead(device, 4, steps)
    return {"step": step, "microbatch": max(several - step, 0.0) / 3}


def _step_overhead(device: Any, microbatches: int, steps: int) -> float:
    """Seconds that a step takes which has next to nothing to compute: what is around the ops of every step."""
    import time

    import torch
    import torch.nn.functional as F

    from unisono.comm.rendezvous import world
    from unisono.parallel.apply import parallelize

    comm = world.world()
    rows = comm.size * microbatches
    batch = (torch.ones(rows, 4, device=device), torch.ones(rows, 4, device=device))
    model = torch.nn.Linear(4, 4).to(device)
    trainer = parallelize(
        model,
        f"dp={comm.size},microbatches={microbatches}",
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    taken = []
    for _ in range(steps):
        comm.barrier()
        start = time.perf_counter()
        trainer.step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[steps // 3]
