"""How a VQNet program joins the world.

VQNet names a backend by the device: "mpi" for CPUs, "nccl" for GPUs. Here that is a preference: nccl where every rank
has a GPU, mpi where mpiexec started the ranks, and gloo on any other machine, so that a program for GPUs runs without.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import launcher_env, world
from unisono.comm.rendezvous.launcher_env import find_rank_info
from unisono.errors import UsageError

BACKENDS = ("mpi", "nccl", "gloo")


def joined(backend: str | None = None, rank: int | None = None, world_size: int | None = None) -> Communicator:
    """The world's communicator; joins the world if this process has not yet."""
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    if not world.is_initialized():
        return world.init(_available(backend), rank=rank, world_size=world_size)
    comm = world.world()
    for name, given, actual in (("rank", rank, comm.rank), ("world_size", world_size, comm.size)):
        if given is not None and given != actual:
            raise UsageError(f"{name}={given} was given, but this process is rank {comm.rank} of {comm.size}")
    return comm


def joined_if_many() -> Communicator | None:
    """The world's communicator, or None where this process is alone and nobody has joined."""
    return joined() if world.is_initialized() or find_rank_info().size > 1 else None


def _available(preferred: str | None) -> str | None:
    if preferred != "mpi":
        return None if preferred == "nccl" else preferred
    by_mpi = find_rank_info().how in (launcher_env.MPIEXEC, launcher_env.SRUN)
    return "mpi" if by_mpi and importlib.util.find_spec("mpi4py") is not None else "gloo"


def communicator_of(given: Any) -> Communicator:
    """Of a CommController, or a Communicator itself; of None, the world's."""
    if given is None:
        return joined()
    found = given if isinstance(given, Communicator) else getattr(given, "comm", None)
    if not isinstance(found, Communicator):
        raise UsageError(f"a communicator of type {type(given).__name__}: expected a CommController")
    return found
