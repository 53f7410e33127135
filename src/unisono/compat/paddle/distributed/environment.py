"""The ranks of this job, and how the strategy divides them: who reads which samples.

The process group is joined at first use. Without a launcher there is one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world as worlds
from unisono.compat.language import say
from unisono.compat.paddle.tensor import agree_on_seed, plain, wrapped
from unisono.errors import UsageError


@dataclass(frozen=True)
class Degrees:
    """How many ranks each kind of parallelism has; ranks are ordered pp, dp, sharding, mp, as those of a plan."""

    dp: int = 1
    mp: int = 1
    pp: int = 1
    sharding: int = 1

    @property
    def data(self) -> int:
        return self.dp * self.sharding

    @property
    def ranks(self) -> int:
        return self.data * self.mp * self.pp


@dataclass
class _State:
    degrees: Degrees | None = None  # of fleet.init's strategy
    strategy: Any = None


state = _State()


def comm() -> Communicator:
    """The communicator of all ranks, joined now if it was not before."""
    if not worlds.is_initialized():
        agree_on_seed(worlds.init().broadcast_object(torch.initial_seed()))  # hosts start with different ones
    return worlds.world()


def get_rank(group: Any = None) -> int:
    return comm().rank


def get_world_size(group: Any = None) -> int:
    return comm().size if group is None else len(group.ranks)


def init_parallel_env() -> None:
    comm()


def is_initialized() -> bool:
    return worlds.is_initialized()


def data_ranks() -> int:
    """How many parts the samples are divided into: one for each rank, but for those that share a model by fleet's
    strategy."""
    return comm().size if state.degrees is None else state.degrees.data


def data_index(rank: int | None = None) -> int:
    """Which part a rank, by default this one, reads."""
    rank = comm().rank if rank is None else rank
    return rank if state.degrees is None else rank // state.degrees.mp % state.degrees.data


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other; made by new_group."""

    ranks: tuple[int, ...]
    comm: Communicator | None  # None on ranks that are not in it

    @property
    def nranks(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        return self.ranks.index(comm().rank) if self.comm is not None else -1


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None, timeout: Any = None) -> Group:
    """A group of ranks; every rank calls it."""
    everyone = comm()
    members = tuple(range(everyone.size)) if ranks is None else tuple(sorted(ranks))
    if not members or len(set(members)) != len(members) or members[-1] >= everyone.size or members[0] < 0:
        raise UsageError(
            say(
                f"new_group({list(ranks or ())}) in a job of {everyone.size} ranks: Paddle would wait for ranks that "
                f"never come; give different ranks from 0 to {everyone.size - 1}, or start more with unisono run -n",
                f"new_group({list(ranks or ())})，而作业只有 {everyone.size} 个进程：飞桨会一直等待不存在的进程；"
                f"请给出 0 到 {everyone.size - 1} 之间互不相同的进程，或用 unisono run -n 启动更多进程",
            )
        )
    if len(members) == everyone.size:
        return Group(members, everyone)
    return Group(members, everyone.subgroup(members) if everyone.rank in members else None)


def _within(group: Group | None) -> Communicator:
    found = comm() if group is None else group.comm
    if found is None:
        listed = list(group.ranks) if group else []
        raise UsageError(
            say(
                f"rank {comm().rank} is not in the group {listed}, where Paddle would do nothing; call it on the "
                "group's ranks only",
                f"进程 {comm().rank} 不在通信组 {listed} 中，飞桨在此不做任何事；请只在组内的进程上调用",
            )
        )
    return found


class ReduceOp:
    SUM, MAX, MIN, PROD, AVG = "sum", "max", "min", "prod", "avg"


def all_reduce(tensor: Any, op: str = ReduceOp.SUM, group: Group | None = None, sync_op: bool = True) -> None:
    """In place, as Paddle's."""
    tensor.data.copy_(_within(group).all_reduce(plain(tensor).detach().clone(), op))


def broadcast(tensor: Any, src: int, group: Group | None = None, sync_op: bool = True) -> None:
    """In place, from rank src of the world."""
    found = _within(group)
    tensor.data.copy_(found.broadcast(plain(tensor).detach().clone(), found.ranks.index(src)))


def all_gather(tensor_list: list[Any], tensor: Any, group: Group | None = None, sync_op: bool = True) -> None:
    tensor_list.extend(wrapped(list(_within(group).all_gather(plain(tensor).detach()))))


def all_gather_object(object_list: list[Any], obj: Any, group: Group | None = None) -> None:
    object_list.extend(_within(group).all_gather_object(obj))


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Group | None = None) -> None:
    found = _within(group)
    object_list[:] = found.broadcast_object(list(object_list), found.ranks.index(src))


def barrier(group: Group | None = None) -> None:
    _within(group).barrier()
