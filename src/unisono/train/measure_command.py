"""`unisono bench hardware`: writes a hardware file for this machine."""

from __future__ import annotations

import argparse
from typing import Any

from unisono.errors import UsageError


def add_kind(kinds: Any) -> None:
    parser = kinds.add_parser("hardware", help="measure this machine for the planner")
    add = parser.add_argument
    add("-n", "-np", dest="n", type=int, default=2, metavar="N", help="ranks that share the machine (default: 2)")
    add("--backend", choices=("gloo", "mpi"), help="default: gloo")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    if chosen.n < 1:
        raise UsageError(f"-n {chosen.n}: expected at least 1")
    print(measure(chosen.n, chosen.backend), end="")
    return 0


def measure(ranks: int = 2, backend: str | None = None) -> str:
    """The text of a hardware file for `ranks` ranks on this machine, or for its GPU."""
    import torch

    from unisono.launch.spawn import spawn
    from unisono.plan.hardware import Hardware
    from unisono.plan.hardware_file import written
    from unisono.plan.measure import merged
    from unisono.train.calibration import calibrated
    from unisono.train.copies import copy_rates

    is_gpu = torch.cuda.is_available()
    figures = merged(spawn(_on_rank, 1 if is_gpu else ranks, backend, (is_gpu,)))
    if not is_gpu:
        figures |= spawn(_host_overheads, 1, None, ())[0]
        alone = Hardware.parse(written(figures, ranks, is_gpu), "measured here")
        figures |= calibrated(alone, ranks, backend)._asdict()
        if ranks > 1:
            known = Hardware.parse(written(figures, ranks, is_gpu), "measured here")
            figures |= copy_rates(known, spawn(_with_zero, ranks, backend, ()))
    return written(figures, ranks, is_gpu)


def _host_overheads() -> dict[str, Any]:
    """What a process takes for each parameter, beside its ops."""
    import torch

    from unisono.train.overheads import overheads

    torch.set_num_threads(1)
    found = overheads(torch.device("cpu"))
    return {name: found[name] for name in ("gradient", "parameter", "message", "split", "recompute")}


def _with_zero() -> list[list[float]]:
    """On a rank: seconds of steps with ZeRO and without."""
    import torch

    from unisono.comm import world
    from unisono.train.copies import steps_with_zero

    torch.set_num_threads(1)
    comm = world.init()
    try:
        return steps_with_zero(comm, 15)
    finally:
        world.shutdown()


def _on_rank(is_gpu: bool) -> dict[str, Any]:
    import torch

    from unisono.comm import world
    from unisono.plan.measure import measured

    if is_gpu:
        return measured_gpu()
    torch.set_num_threads(1)
    comm = world.init()
    try:
        device = torch.device("cpu")
        return measured(comm, device) | around_steps(device, 30)
    finally:
        world.shutdown()


def measured_gpu() -> dict[str, Any]:
    """The figures of this process's GPU; it must not have joined a world. Links are not measured."""
    import torch

    from unisono.comm import world
    from unisono.plan.measure import measured
    from unisono.train.overheads import overheads

    device = torch.device("cuda")
    with world.simulated(0, 1) as comm:
        figures = measured(comm, device)
    return figures | overheads(device)


def around_steps(device: Any, steps: int) -> dict[str, float]:
    """Figures of what is around the ops of a step, and of each further microbatch; all ranks of the world call it."""
    step, several = _step_overhead(device, 1, steps), _step_overhead(device, 4, steps)
    return {"step": step, "microbatch": max(several - step, 0.0) / 3}


def _step_overhead(device: Any, microbatches: int, steps: int) -> float:
    """Seconds that a step takes which has next to nothing to compute: what is around the ops of every step."""
    import time

    import torch
    import torch.nn.functional as F

    from unisono.comm import world
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
