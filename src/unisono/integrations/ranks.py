"""What the plugins share: the ranks of the job that hold states, programs compiled for them, and random generators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.comm.rendezvous.launcher_env import find_rank_info
from unisono.errors import UsageError
from unisono.quantum.arguments import shown
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.parameter import is_index
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.schedule.logical_qubits import narrowest
from unisono.quantum.schedule.schedule import Schedule
from unisono.quantum.state import device_of, nodes_of


def job_communicator(ranks: int | None) -> Communicator | None:
    """The ranks that share states: those of the job, or None for this process alone."""
    if ranks is not None and (not is_index(ranks) or ranks < 1 or int(ranks) & int(ranks) - 1):
        raise UsageError(f"ranks={ranks!r}: expected a power of two, the number of ranks of the job, or 1")
    if ranks == 1:
        return None
    size = world.world_size() if world.is_initialized() else find_rank_info().size
    if ranks is not None and ranks != size:
        raise UsageError(
            f"ranks={ranks} in a job of {size}: start it with `unisono run -n {ranks}`, or leave ranks out for all "
            "ranks of the job"
        )
    if size == 1:
        return None
    if size & size - 1:
        raise UsageError(f"{size} ranks for one state: expected a power of two; use ranks=1 for a state on each rank")
    return world.world() if world.is_initialized() else world.init()


def shared_generator(seed: Any, comm: Communicator | None) -> np.random.Generator:
    if isinstance(seed, str) and seed == "global":
        seed = np.random.randint(0, high=10_000_000)
    try:
        made = np.random.default_rng(seed)
    except (TypeError, ValueError):
        raise UsageError(f"seed={shown(seed)}: expected a whole number of 0 or more, None or 'global'") from None
    return made if comm is None else comm.broadcast_object(made)


def compiled(
    circuit: Circuit,
    comm: Communicator | None,
    dtype: torch.dtype,
    device: torch.device | None,
    kernel: str,
    *,
    has_start: bool = False,
) -> tuple[QuantumProgram, Communicator | None]:
    """The program, and the ranks that share its states: all, or, where a state has too few wires for that, each rank by
    itself."""
    ranks = 1 if comm is None else comm.size
    if circuit.wires - (ranks.bit_length() - 1) < narrowest(circuit.operations):
        comm, ranks = None, 1
    start = range(circuit.wires) if has_start else None
    schedule = Schedule.of(circuit, ranks, nodes=nodes_of(comm), start=start)
    program = QuantumProgram.of(schedule, comm.rank if comm else 0)
    program.prepare(circuit.wires - schedule.global_qubits, dtype, device_of(comm, device), kernel)
    return program, comm
