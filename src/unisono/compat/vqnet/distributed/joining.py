"""How a VQNet program joins the world.

VQNet names a backend by the device: "mpi" for CPUs, "nccl" for GPUs. Here that is a preference: nccl where every rank
has a GPU, mpi where mpiexec started the ranks, and gloo on any other machine, so that a program for GPUs runs without.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import launcher_env, world
from unisono.comm.rendezvous.launcher_env import find_rank_info
from unisono.compat.language import say
from unisono.errors import UsageError

BACKENDS = ("mpi", "nccl", "gloo")


def joined(backend: str | None = None, rank: int | None = None, world_size: int | None = None) -> Communicator:
    """The world's communicator; joins the world if this process has not yet."""
    if backend is not None and backend not in BACKENDS:
        raise UsageError(
            say(
                f"backend {backend!r}: expected one of {', '.join(BACKENDS)}",
                f"后端 {backend!r}：应为 {', '.join(BACKENDS)} 之一",
            )
        )
    if not world.is_initialized():
        return world.init(_available(backend), rank=rank, world_size=world_size)
    comm = world.world()
    for name, given, actual in (("rank", rank, comm.rank), ("world_size", world_size, comm.size)):
        if given is not None and given != actual:
            raise UsageError(
                say(
                    f"{name}={given} was given, but this process is rank {comm.rank} of {comm.size}",
                    f"给出了 {name}={given}，而本进程是 {comm.size} 个进程中的 {comm.rank} 号",
                )
            )
    return comm


def joined_if_many() -> Communicator | None:
    """The world's communicator, or None where this process is alone and nobody has joined."""
    return joined() if world.is_initialized() or find_rank_info().size > 1 else None


def _available(preferred: str | None) -> str | None:
    if preferred != "mpi":
        return None if preferred == "nccl" else preferred
    by_mpi = find_rank_info().how in (launcher_env.MPIEXEC, launcher_env.SRUN)
    if by_mpi and importlib.util.find_spec("mpi4py") is not None:
        return "mpi"
    if find_rank_info().rank == 0 and find_rank_info().size > 1:  # a process joins once, so it is printed once
        why = (
            ("mpi4py is not installed", "未安装 mpi4py")
            if by_mpi
            else ("mpiexec did not start it", "程序不由 mpiexec 启动")
        )
        warnings.warn(
            say(
                f'CommController("mpi") communicates over gloo here, with the same results: {why[0]}; for MPI, '
                "start it with mpiexec -n N",
                f'CommController("mpi") 在此使用 gloo 通信，结果相同：{why[1]}；要用 MPI，请用 mpiexec -n N 启动',
            ),
            stacklevel=4,
        )
    return "gloo"


def world_size() -> int:
    """How many ranks run, also before this process has joined."""
    return world.world_size() if world.is_initialized() else find_rank_info().size


def communicator_of(given: Any) -> Communicator:
    """Of a CommController, or a Communicator itself; of None, the world's."""
    if given is None:
        return joined()
    found = given if isinstance(given, Communicator) else getattr(given, "comm", None)
    if not isinstance(found, Communicator):
        raise UsageError(
            say(
                f"a communicator of type {type(given).__name__}: expected a CommController",
                f"通信器的类型为 {type(given).__name__}：应为 CommController",
            )
        )
    return found
