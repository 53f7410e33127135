"""CommController: the collectives under VQNet's names."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.comm.rendezvous.launcher_env import find_rank_info
from unisono.compat.language import say
from unisono.compat.vqnet.distributed.group import CommGroup, comm_of_group, groups_of
from unisono.compat.vqnet.distributed.joining import joined
from unisono.compat.vqnet.tensor.qtensor import plain, wrapped
from unisono.compat.vqnet.whole import whole_number
from unisono.errors import UsageError
from unisono.parallel.layout import layout_of


class CommController:
    """All ranks of the job; `backend` is the one that they really use, `comm` unisono's own communicator.

    "mpi" and "nccl" are preferences (see `joining`). Reductions are in place; c_op is avg, sum, max, min or any other
    of `Communicator.all_reduce`. In a group, `root` is a rank of the group.
    """

    def __init__(self, backend: str, rank: int | None = None, world_size: int | None = None) -> None:
        self.comm = joined(backend, rank, world_size)
        self.backend = self.comm.backend

    def __repr__(self) -> str:
        return f"CommController(rank={self.comm.rank}, size={self.comm.size}, backend={self.backend!r})"

    def getRank(self) -> int:
        return self.comm.rank

    def getSize(self) -> int:
        return self.comm.size

    def getLocalRank(self) -> int:
        return self.comm.local_rank

    def get_device_num(self) -> int:
        """How many GPUs this host has; 0 without."""
        return self.comm.device_count

    def barrier(self) -> None:
        self.comm.barrier()

    # ---- all ranks -----------------------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, c_op: str = "avg") -> None:
        self.allreduce_group(tensor, c_op)

    def reduce(self, tensor: torch.Tensor, root: int = 0, c_op: str = "avg") -> None:
        self.reduce_group(tensor, root, c_op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self.broadcast_group(tensor, root)

    def allgather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, one after the other along the first dim."""
        return self.allgather_group(tensor)

    def send(self, tensor: torch.Tensor, dest: int) -> None:
        self.comm.send(_memory(tensor, "send"), _rank("send", "dest", dest))

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Receive into the tensor."""
        self.comm.recv(_memory(tensor, "recv"), _rank("recv", "source", source))

    # ---- groups --------------------------------------------------------------------------------------------------

    def split_group(self, rankL: Sequence[Sequence[int]]) -> list[CommGroup]:
        """A pair (communicator, ranks) for each list; ranks outside a group have None for its communicator."""
        return groups_of(self.comm, rankL)

    def allreduce_group(self, tensor: torch.Tensor, c_op: str = "avg", group: Any = None) -> None:
        self._of(group).all_reduce(_memory(tensor, "allreduce"), c_op)

    def reduce_group(self, tensor: torch.Tensor, root: int = 0, c_op: str = "avg", group: Any = None) -> None:
        self._of(group).reduce(_memory(tensor, "reduce"), _rank("reduce", "root", root), c_op)

    def broadcast_group(self, tensor: torch.Tensor, root: int = 0, group: Any = None) -> None:
        self._of(group).broadcast(_memory(tensor, "broadcast"), _rank("broadcast", "root", root))

    def allgather_group(self, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        shards = self._of(group).all_gather(_memory(tensor, "allgather"))
        return wrapped(torch.cat(shards) if tensor.dim() else torch.stack(shards))

    all_gather_group = allgather_group

    def _of(self, group: Any) -> Communicator:
        return comm_of_group(group, self.comm)

    # ---- modules -------------------------------------------------------------------------------------------------

    def broadcast_model_params(self, model: nn.Module, root: int = 0) -> None:
        """Make every rank's parameters and buffers those of the root.

        Shards of layers that ranks share (ColumnParallelLinear, RowParallelLinear) differ by right, and stay.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(
                say(
                    f"broadcast_model_params takes a Module, not a {type(model).__name__}",
                    f"broadcast_model_params 接受 Module，而不是 {type(model).__name__}",
                )
            )
        replicated = nn.Module()
        for name, parameter in model.named_parameters():
            if not layout_of(parameter).splits:
                replicated.register_parameter(name.replace(".", "/"), parameter)
        for name, buffer in model.named_buffers():
            replicated.register_buffer(name.replace(".", "/"), buffer)
        self.comm.broadcast_parameters(replicated, _rank("broadcast_model_params", "root", root))


def _memory(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The tensor's own memory, for a collective to read and write."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            say(
                f"{op} takes a tensor, not a {type(tensor).__name__}; make one with tensor.to_tensor",
                f"{op} 接受张量，而不是 {type(tensor).__name__}；请用 tensor.to_tensor 建立",
            )
        )
    return plain(tensor).detach()


def _rank(op: str, name: str, given: Any) -> int:
    """A rank as a number; the communicator checks whether there is such a rank."""
    rank = whole_number(given)
    if rank is None:
        raise UsageError(
            say(
                f"{op}: {name}={given!r}; expected a rank, which is a whole number",
                f"{op}：{name}={given!r}；应为进程编号，即整数",
            )
        )
    return rank


def get_rank() -> int:
    """This process's rank in the job, also before it has joined."""
    return world.rank() if world.is_initialized() else find_rank_info().rank


def get_local_rank() -> int:
    """This process's rank on its host."""
    if not world.is_initialized():
        local_rank = find_rank_info().local_rank
        if local_rank is not None:
            return local_rank
    return joined().local_rank


def get_world_size() -> int:
    return world.world_size() if world.is_initialized() else find_rank_info().size


def get_host_name() -> str:
    return socket.gethostname()


def init_group(rank_lists: Sequence[Sequence[int]]) -> list[CommGroup]:
    """As CommController.split_group, for the world's ranks."""
    return groups_of(joined(), rank_lists)
