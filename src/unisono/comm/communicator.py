"""The Communicator: one group of ranks and the operations between them.

Read in this order: operation.py (how every operation runs), collectives.py, p2p.py, objects.py, then this file, which
makes groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.comm.c10d import C10dTransport
from unisono.comm.objects import Objects
from unisono.comm.operation import Transport
from unisono.comm.signatures.seal import Seal
from unisono.comm.watchdog.op_log import P2P, describe
from unisono.comm.watchdog.watchdog import MARGIN, Watchdog
from unisono.errors import UsageError
from unisono.launch import process_threads
from unisono.torch_patches import patched

MakeTransport = Callable[[dist.ProcessGroup, str], Transport]


def make_transport(group: dist.ProcessGroup, backend: str) -> Transport:
    if backend != "mpi":
        return C10dTransport(group, backend)
    from unisono.comm.mpi.transport import MPITransport  # imports mpi4py

    return MPITransport(group)


@contextlib.contextmanager
def _group_named(name: str) -> Iterator[None]:
    """Give the next process group this name.

    torch names a group that only its members make after the number of groups the rank is in already; that number may
    differ between members, who then wait for each other under different names.
    """
    why = "ranks that make a group name it alike"
    with patched(distributed_c10d, "_process_group_name", lambda *_, **__: name, why=why):
        yield


class Communicator(Objects):
    """A group of ranks that communicate over one backend.

    `rank` is this rank's index in the group, `size` the group's size; `ranks` are the group's members as ranks of the
    world. All ranks that methods take or return are ranks of the group. `is_simulated`: the other ranks do not exist,
    and the values they would send mean nothing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        watchdog: Watchdog,
        *,
        local_rank: int,
        local_size: int,
        hosts: Sequence[str],
        name: str = "world",
        key: bytes | None = None,
        make_transport: MakeTransport = make_transport,
    ) -> None:
        self.group = group
        self.backend = backend
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.local_rank = local_rank
        self.local_size = local_size
        self.host = hosts[dist.get_rank()]
        self._hosts = tuple(hosts)
        self._children: dict[str, int] = {}
        self._watchdog = watchdog
        self.seal = Seal(key, name)
        self._log = watchdog.new_log(name, self.ranks)
        self._p2p_log = watchdog.new_log(name + P2P, self.ranks)
        watchdog.group_logs[group] = self._log
        self._make_transport = make_transport
        self._transport = make_transport(group, backend)
        self.is_simulated = self._transport.is_simulated
        self._fast_path = None
        if backend == "mpi" and not watchdog.checks:
            from unisono.comm.mpi.fast_path import FastPath  # imports mpi4py

            self._fast_path = FastPath(group, watchdog, self._log, self._p2p_log)

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, backend={self.backend!r}, host={self.host!r})"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank of the group."""
        return tuple(self._hosts[rank] for rank in self.ranks)

    @property
    def device(self) -> torch.device:
        """The device for this rank's tensors."""
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")

    @property
    def device_count(self) -> int:
        """How many GPUs this host has."""
        return torch.cuda.device_count()

    # ---- groups and modules --------------------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        """The communicator of the one of `groups` that this rank is in, or None. Every rank calls it, with the same
        lists."""
        lists = groups if isinstance(groups, Sequence) else [groups]
        if not all(isinstance(group, Sequence) and not isinstance(group, str) for group in lists):
            raise UsageError(f"split {groups!r}: expected a list of lists of ranks, such as [[0, 1], [2, 3]]")
        members = [rank for group in groups for rank in group]
        for rank in members:
            self._require_rank("rank", rank)
        if len(set(members)) != len(members):
            twice = sorted({rank for rank in members if members.count(rank) > 1})
            raise UsageError(f"split: rank {twice[0]} is in two groups; groups of one split must not overlap")
        if self._watchdog.checks:
            self._watchdog.begin(self._log, "split", str([list(group) for group in groups]), None)
            self._log.left = self._log.entered
        mine = next((group for group in groups if self.rank in group), None)
        return None if mine is None else self._subgroup(mine)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of some ranks of this one, in their order here. All of them call it, and only they."""
        if not isinstance(ranks, Sequence):
            raise UsageError(f"subgroup {ranks!r}: expected a list of ranks, such as [0, 1]")
        for rank in ranks:
            self._require_rank("rank", rank)
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise UsageError(f"subgroup {list(ranks)}: expected different ranks, this rank ({self.rank}) among them")
        return self._subgroup(ranks)

    def _subgroup(self, ranks: Sequence[int]) -> Communicator:
        world_ranks = sorted(self.ranks[rank] for rank in ranks)
        name = self._child_name(world_ranks)
        members = ",".join(map(str, sorted(ranks)))
        self._watchdog.begin(self._p2p_log, f"the making of the group of ranks {members}", "", None)
        try:
            group = self._new_group(name, world_ranks)
        finally:
            self._p2p_log.left = self._p2p_log.entered
        here = [rank for rank in world_ranks if self._hosts[rank] == self.host]
        return Communicator(
            group,
            self.backend,
            self._watchdog,
            local_rank=here.index(self.ranks[self.rank]),
            local_size=len(here),
            hosts=self._hosts,
            name=name,
            key=self.seal.key,
            make_transport=self._make_transport,
        )

    def _new_group(self, name: str, world_ranks: list[int]) -> dist.ProcessGroup:
        with _group_named(name), process_threads.gloo_threads_batch_scheduled(self.backend):
            timeout = timedelta(seconds=self._watchdog.timeout + MARGIN)
            group: dist.ProcessGroup = dist.new_group(world_ranks, timeout, use_local_synchronization=True)
        if self.backend == "gloo":  # a member that ended now would close lines that another is still connecting
            group.barrier().wait()
        return group

    def _child_name(self, world_ranks: list[int]) -> str:
        """The same on all members, whichever other groups each of them has made."""
        members = ",".join(map(str, world_ranks))
        self._children[members] = self._children.get(members, 0) + 1
        return f"{self._log.group}/{members}#{self._children[members]}"

    def broadcast_parameters(self, module: torch.nn.Module, root: int = 0) -> None:
        """Make every rank's parameters and buffers those of the root."""
        self._require_rank("root", root)
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"broadcast_parameters: expected a torch.nn.Module, but was given {module!r}")
        tensors = [*module.named_parameters(), *module.named_buffers()]
        mine = [f"{name} {describe(each.shape, each.dtype)}" for name, each in tensors]
        everyone = self.all_gather_object(mine, only_data=True)
        for rank, theirs in enumerate(everyone):
            for one, other in zip_longest(theirs, everyone[root], fillvalue="nothing more"):
                if one != other:
                    found = f"rank {rank} has {one} where rank {root} has {other}"
                    raise UsageError(f"broadcast_parameters: the modules differ: {found}")
        handles = [self.broadcast(tensor, root, async_op=True) for _, tensor in tensors]
        for handle in handles:
            handle.wait()
