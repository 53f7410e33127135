"""The Communicator: one group of ranks, and everything they can say to each other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.comm import traffic
from unisono.comm.backends import GLOO
from unisono.comm.departures import ANY_SOURCE
from unisono.comm.handle import Awaited, Handle
from unisono.comm.labels import Labels, Message, Place, Received, require_tag
from unisono.comm.log import MESSAGES, describe
from unisono.comm.objects import Objects
from unisono.comm.operation import Finish, Outcome
from unisono.comm.watch import MARGIN, Watch
from unisono.errors import MessageError, UsageError
from unisono.launch import turns


@contextlib.contextmanager
def _group_named(name: str) -> Iterator[None]:
    """Give the next process group this name.

    torch names a group that only its members make after the number of groups the rank is in already; that number may
    differ between members, who then wait for each other under different names.
    """
    original = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


def _batched(ops: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(ops) if ops else []


Piece = tuple[torch.Tensor, int]  # a tensor, and the rank it goes to or comes from


class Communicator(Objects):
    """A group of ranks that talk over one backend.

    `rank` and `size` are this rank's place in the group and the group's size; `ranks` are the group's members as
    ranks of the world. All ranks that methods take or return are ranks of the group.
    """

    is_simulated = False  # whether the other ranks are not there, and what they would bring means nothing

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        watch: Watch,
        *,
        local_rank: int,
        local_size: int,
        hosts: Sequence[str],
        name: str = "world",
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
        self._watch = watch
        self._log = watch.new_log(name, self.ranks)
        watch.group_logs[group] = self._log
        self._children: dict[str, int] = {}
        self._letters = watch.new_log(name + MESSAGES, self.ranks)
        self._labels = Labels(group, watch.check is not None)

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, backend={self.backend!r}, host={self.host!r})"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank of the group."""
        return tuple(self._hosts[rank] for rank in self.ranks)

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live best."""
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")

    @property
    def device_count(self) -> int:
        """How many GPUs this host has."""
        return torch.cuda.device_count()

    # ---- point to point ------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """Send a tensor; returns when it may be changed again."""
        self._send("send", tensor, to, tag).wait()

    def recv(self, tensor: torch.Tensor, source: int | None = None, tag: int = 0) -> int:
        """Receive into a tensor, from one rank or (None) from any; returns the rank it came from."""
        if source is not None:
            self._receive("recv", tensor, source, tag).wait()
            return source
        require_tag(tag)
        wire, finish = self._moving(tensor)
        place = Place(self._labels, tensor, wire) if self._is_mute(tensor) else None
        self._letters.enter(ANY_SOURCE, "", tensor, 2)
        self._note_receipt(ANY_SOURCE, tensor, 2)
        try:
            sender = dist.get_group_rank(self.group, dist.recv(wire, group=self.group, tag=tag))
        except MessageError:
            raise
        except RuntimeError as error:
            raise self._watch.explained(error) from error
        finally:
            self._letters.left = self._letters.entered
        if place is not None:
            place.check_from(sender, tag)
        finish()
        return sender

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Handle:
        """Begin to send; the tensor must not change until the handle is waited for."""
        return self._send("isend", tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Handle:
        """Begin to receive; the tensor must not be read until the handle is waited for."""
        return self._receive("irecv", tensor, source, tag)

    def exchange(self, sends: Sequence[Piece] = (), recvs: Sequence[Piece] = (), *, async_op: bool = False) -> Outcome:
        """Send and receive many tensors at once, in any pattern, without deadlock.

        `sends` are (tensor, to) and `recvs` are (tensor, source); between two ranks they pair up in order.
        """
        for _, peer in (*sends, *recvs):
            self._require_peer(peer)
        receiving = [self._moving(tensor) for tensor, _ in recvs]
        sending = [(self._moving(tensor)[0], to) for tensor, to in sends]
        peers = ",".join(str(peer) for peer in sorted({peer for _, peer in (*sends, *recvs)}))
        if traffic.counters:
            for tensor, to in sends:
                traffic.note("send", self.size, tensor, (self.ranks[to],))
            for tensor, source in recvs:
                traffic.note_arrival(tensor, self.ranks[source])
        self._letters.enter(f"exchange with ranks {peers}", "", None, 2)
        self._note_receipt(f"exchange with ranks {peers}", None, 2)

        def finish() -> list[torch.Tensor]:
            return [finish_one() for _, finish_one in receiving]

        is_mute = self._is_mute(*(tensor for tensor, _ in (*sends, *recvs)))
        try:
            begin = self._exchange_labelled if is_mute else self._exchange_batched
            works: Sequence[Awaited] = begin(sending, receiving, recvs)
        except RuntimeError as error:
            raise self._watch.explained(error) from error
        finally:
            self._letters.left = self._letters.entered
        handle = Handle(works, finish, self._watch.waiter(self._letters), is_mute=is_mute)
        return handle if async_op else handle.wait()

    def _exchange_batched(
        self, sending: Sequence[Piece], receiving: Sequence[tuple[torch.Tensor, Finish]], recvs: Sequence[Piece]
    ) -> list[dist.Work]:
        ops = [dist.P2POp(dist.isend, wire, group=self.group, group_peer=to) for wire, to in sending]
        ops += [
            dist.P2POp(dist.irecv, wire, group=self.group, group_peer=source)
            for (wire, _), (_, source) in zip(receiving, recvs, strict=True)
        ]
        return _batched(ops)

    def _exchange_labelled(
        self, sending: Sequence[Piece], receiving: Sequence[tuple[torch.Tensor, Finish]], recvs: Sequence[Piece]
    ) -> list[Message]:
        """Over gloo. Messages are expected before any is sent: one that is finds its place, and need not ask for it."""
        came = []
        for (tensor, source), (wire, _) in zip(recvs, receiving, strict=True):
            place = Place(self._labels, tensor, wire)
            place.expect_label(source, 0)
            came.append(Received(self.group.recv([wire], source, 0), place, source))
        sent = []
        for wire, to in sending:
            label = self._labels.send(wire, to, 0)
            sent.append(Message(self.group.send([wire], to, 0), label))
        return [*came, *sent]

    def block(self, what: str, until: Callable[[], None]) -> None:
        """Wait for other ranks in a way of one's own, where the watch sees it: `until` returns, or raises RuntimeError
        where what is waited for will not come."""
        self._letters.enter(what, "", None, 2)
        try:
            self._watch.waiter(self._letters)(until)
        finally:
            self._letters.left = self._letters.entered

    def _send(self, op: str, tensor: torch.Tensor, to: int, tag: int) -> Handle:
        self._require_peer(to)
        require_tag(tag)
        wire, _ = self._moving(tensor)
        is_mute = self._is_mute(tensor)
        if traffic.counters:
            traffic.note("send", self.size, tensor, (self.ranks[to],))
        self._letters.enter(f"{op} to rank {to}", "", tensor, 3)
        try:
            label = self._labels.send(wire, to, tag) if is_mute else None
            work = dist.isend(wire, group=self.group, group_dst=to, tag=tag)
        except RuntimeError as error:
            raise self._watch.explained(error) from error
        finally:
            self._letters.left = self._letters.entered
        waiter = self._watch.waiter(self._letters)
        return Handle([Message(work, label) if label else work] if work else [], lambda: wire, waiter, is_mute=is_mute)

    def _receive(self, op: str, tensor: torch.Tensor, source: int, tag: int) -> Handle:
        self._require_peer(source)
        require_tag(tag)
        wire, finish = self._moving(tensor)
        is_mute = self._is_mute(tensor)
        if traffic.counters:
            traffic.note_arrival(tensor, self.ranks[source])
        self._letters.enter(f"{op} from rank {source}", "", tensor, 3)
        self._note_receipt(f"{op} from rank {source}", tensor, 3)
        try:
            place = Place(self._labels, tensor, wire) if is_mute else None
            if place is not None:
                place.expect_label(source, tag)
            work = dist.irecv(wire, group=self.group, group_src=source, tag=tag)
        except RuntimeError as error:
            raise self._watch.explained(error) from error
        finally:
            self._letters.left = self._letters.entered
        waiter = self._watch.waiter(self._letters)
        works: list[Awaited] = []
        if work is not None:
            works.append(work if place is None else Received(work, place, source))
        return Handle(works, finish, waiter, is_mute=is_mute)

    def _note_receipt(self, what: str, tensor: torch.Tensor | None, depth: int) -> None:
        """In the black box: gloo ends a rank that is sent more than it expects."""
        if self._watch.box is not None:
            self._watch.box.write_message(self._letters, what, tensor, sys._getframe(depth))

    def _is_mute(self, *tensors: torch.Tensor) -> bool:
        """Whether messages of these tensors go over gloo, which does not tell that one has arrived."""
        return any(self._carrier(tensor) is GLOO for tensor in tensors)

    def _require_peer(self, peer: int) -> None:
        self._require_rank("peer", peer)
        if peer == self.rank:
            raise UsageError(f"rank {peer} would send to or receive from itself; copy the tensor instead")

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
        if self._watch.check is not None:
            self._log.enter("split", str([list(group) for group in groups]), None, 2)
            try:
                self._watch.check.agree(self._log)
            finally:
                self._log.left = self._log.entered
        mine = next((group for group in groups if self.rank in group), None)
        return None if mine is None else self._subgroup(mine, 3)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of some ranks of this one, in their order here. All of them call it, and only they."""
        if not isinstance(ranks, Sequence):
            raise UsageError(f"subgroup {ranks!r}: expected a list of ranks, such as [0, 1]")
        for rank in ranks:
            self._require_rank("rank", rank)
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise UsageError(f"subgroup {list(ranks)}: expected different ranks, this rank ({self.rank}) among them")
        return self._subgroup(ranks, 3)

    def _subgroup(self, ranks: Sequence[int], depth: int) -> Communicator:
        world_ranks = sorted(self.ranks[rank] for rank in ranks)
        name = self._child_name(world_ranks)
        self._letters.enter(f"the making of the group of ranks {','.join(map(str, sorted(ranks)))}", "", None, depth)
        try:
            group = self._new_group(name, world_ranks)
        finally:
            self._letters.left = self._letters.entered
        here = [rank for rank in world_ranks if self._hosts[rank] == self.host]
        return type(self)(
            group,
            self.backend,
            self._watch,
            local_rank=here.index(self.ranks[self.rank]),
            local_size=len(here),
            hosts=self._hosts,
            name=name,
        )

    def _new_group(self, name: str, world_ranks: list[int]) -> dist.ProcessGroup:
        with _group_named(name):
            patience = timedelta(seconds=self._watch.timeout + MARGIN)
            group: dist.ProcessGroup = dist.new_group(world_ranks, patience, use_local_synchronization=True)
        if self.backend != "mpi":
            turns.let_gloo_give_way()
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
        everyone = self.all_gather_object([f"{name} {describe(each.shape, each.dtype)}" for name, each in tensors])
        for rank, theirs in enumerate(everyone):
            for one, other in zip_longest(theirs, everyone[root], fillvalue="nothing more"):
                if one != other:
                    found = f"rank {rank} has {one} where rank {root} has {other}"
                    raise UsageError(f"broadcast_parameters: the modules differ: {found}")
        handles = [self.broadcast(tensor, root, async_op=True) for _, tensor in tensors]
        for handle in handles:
            handle.wait()
