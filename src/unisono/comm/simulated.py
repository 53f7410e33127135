"""A communicator whose other ranks are not there: each of them is taken to have what this one has.

Messages take no time, but for one copy where something must come: what is computed from it is then numbers, not what
memory held before. What comes from one other rank, which may do something else altogether, is random numbers. Small
sums, by which programs decide what to do next, are those of ranks that are all alike. Tensors without numbers ("meta")
may take part in everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist

from unisono.comm import traffic
from unisono.comm.communicator import Communicator, Piece
from unisono.comm.handle import Handle
from unisono.comm.operation import Finish, Outcome, Start
from unisono.comm.reduction import Factor

_FEW = 1024  # elements, up to which a sum is one
_PATTERN = 4093  # random numbers that are repeated in all that comes


class SimulatedCommunicator(Communicator):
    """One rank of a world whose others are not there."""

    is_simulated = True

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, factor: Factor | None = None, async_op: bool = False
    ) -> Outcome:
        def start() -> list[dist.Work]:
            if op == "sum" and tensor.numel() <= _FEW:
                tensor.detach().mul_(self.size)
            return []

        return self._run("all_reduce", tensor, start, lambda: tensor, async_op)

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Outcome:
        self._require_room(out, tensor)

        def start() -> list[dist.Work]:
            out.detach().view(self.size, -1).copy_(tensor.detach().reshape(1, -1))
            return []

        return self._run("all_gather_into", tensor, start, lambda: out, async_op)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        sizes: Sequence[int] | None = None,
        factor: Factor | None = None,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Outcome:
        parts = self._parts("reduce_scatter", tensor, sizes)
        room = self._room("reduce_scatter", out, tensor, parts[self.rank])

        def start() -> list[dist.Work]:
            room.copy_(tensor.detach().split(parts)[self.rank])
            return []

        return self._run("reduce_scatter", tensor, start, lambda: room, async_op)

    def all_to_all(
        self,
        tensor: torch.Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Outcome:
        parts = self._parts("all_to_all", tensor, send_sizes)
        # What each of the others has for this rank is what this rank has for itself.
        incoming = [parts[self.rank]] * self.size if recv_sizes is None else list(recv_sizes)
        room = self._room("all_to_all", out, tensor, sum(incoming))

        def start() -> list[dist.Work]:
            own = tensor.detach().split(parts)[self.rank]
            for place in room.detach().split(incoming):
                if place.shape == own.shape:
                    place.copy_(own)
                else:
                    _arrive(place)
            return []

        return self._run("all_to_all", tensor, start, lambda: room, async_op)

    def exchange(self, sends: Sequence[Piece] = (), recvs: Sequence[Piece] = (), *, async_op: bool = False) -> Outcome:
        for _, peer in (*sends, *recvs):
            self._require_peer(peer)
        for tensor, to in sends:
            self._note(tensor, to)
        for tensor, _ in recvs:
            _arrive(tensor)
        handle = Handle([], lambda: [tensor for tensor, _ in recvs])
        return handle if async_op else handle.wait()

    def _send(self, op: str, tensor: torch.Tensor, to: int, tag: int) -> Handle:
        self._require_peer(to)
        self._note(tensor, to)
        return Handle([], lambda: tensor)

    def _receive(self, op: str, tensor: torch.Tensor, source: int, tag: int) -> Handle:
        self._require_peer(source)
        _arrive(tensor)
        return Handle([], lambda: tensor)

    def _note(self, tensor: torch.Tensor, to: int) -> None:
        if traffic.counters:
            traffic.note("send", self.size, tensor, (self.ranks[to],))

    def _run(
        self,
        op: str,
        tensor: torch.Tensor | None,
        start: Start,
        finish: Finish,
        async_op: bool,
        detail: str = "",
        depth: int = 3,
        blocks: bool = False,
        is_mute: bool = False,
    ) -> Outcome:
        if tensor is not None and tensor.is_meta:
            start = list  # nothing is begun: there are no numbers to carry
        return super()._run(op, tensor, start, finish, async_op, detail, depth + 1, blocks)


@torch.no_grad()
def _arrive(tensor: torch.Tensor) -> None:
    """Random numbers come, of the size of activations; zeros where they are to be whole numbers."""
    if tensor.is_meta:
        return
    if not tensor.is_floating_point():
        tensor.zero_()
        return
    pattern = _pattern(tensor.device, tensor.dtype)
    flat = tensor.view(-1)
    times, rest = divmod(len(flat), _PATTERN)
    flat[: times * _PATTERN].view(times, _PATTERN).copy_(pattern)
    flat[len(flat) - rest :].copy_(pattern[:rest])


@cache
def _pattern(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0)).to(device, dtype)
