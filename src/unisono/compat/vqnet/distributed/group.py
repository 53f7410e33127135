"""Groups of ranks, as VQNet's `split_group` and `init_group` give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from unisono.comm.communicator import Communicator
from unisono.compat.language import say
from unisono.compat.vqnet.whole import whole_number
from unisono.errors import UsageError


class CommGroup(NamedTuple):
    """A group's communicator (None on ranks that are not in it) and its ranks in the world."""

    comm: Communicator | None
    ranks: list[int]


def groups_of(comm: Communicator, rank_lists: Sequence[Sequence[int]]) -> list[CommGroup]:
    """One group for each list; every rank calls it, with the same lists. A rank may be in several."""
    lists = [_ranks(ranks) for ranks in _listed(rank_lists)]
    for ranks in lists:
        if not ranks or len(set(ranks)) != len(ranks):
            raise UsageError(
                say(
                    f"group {ranks}: expected different ranks, one at least",
                    f"组 {ranks}：应为互不相同的进程，至少一个",
                )
            )
        for rank in ranks:
            if not 0 <= rank < comm.size:
                raise UsageError(
                    say(
                        f"group {ranks}: rank {rank!r} is not one of 0 to {comm.size - 1}",
                        f"组 {ranks}：{rank!r} 不是 0 到 {comm.size - 1} 的进程编号",
                    )
                )
    return [CommGroup(comm.subgroup(ranks) if comm.rank in ranks else None, ranks) for ranks in lists]


def _listed(given: Any) -> list[Any]:
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise UsageError(
            say(
                f"groups {given!r}: expected a list of ranks for each, such as [[0, 1], [2, 3]]",
                f"groups {given!r}：应为各组的进程编号列表，如 [[0, 1], [2, 3]]",
            )
        )
    return list(given)


def _ranks(given: Any) -> list[int]:
    ranks = [whole_number(rank) for rank in _listed(given)]
    if None in ranks:
        raise UsageError(
            say(
                f"group {given!r}: expected a list of ranks, which are whole numbers",
                f"组 {given!r}：应为进程编号（整数）的列表",
            )
        )
    return [rank for rank in ranks if rank is not None]


def comm_of_group(group: Any, otherwise: Communicator) -> Communicator:
    """Of what a VQNet program passes as `group`: an element of the list, its communicator, or None for all ranks."""
    if group is None:
        return otherwise
    if isinstance(group, CommGroup):
        if group.comm is None:
            raise UsageError(
                say(
                    f"rank {otherwise.rank} is not in group {group.ranks}; only its ranks call on it",
                    f"进程 {otherwise.rank} 不在组 {group.ranks} 中；只有组内的进程可以调用",
                )
            )
        return group.comm
    if not isinstance(group, Communicator):
        raise UsageError(
            say(
                f"group={group!r}: expected an element of what split_group or init_group gave, or its communicator",
                f"group={group!r}：应为 split_group 或 init_group 给出的一个元素，或其通信器",
            )
        )
    return group
