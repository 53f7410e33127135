"""The transport over torch's process groups: gloo and NCCL.

Each operation brings its tensors into a form that the library takes (contiguous, on its device, of its dtypes), starts
a c10d call, and brings the outcome back. What a library cannot do is done here in terms of what it can (see
comm/backends.py), so that the outcome is the same on all of them.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from unisono.comm.backends import GLOO, NCCL, Library, WirePlan, movable, moved_elements, plan_wire
from unisono.comm.operation import Message, Transfer
from unisono.comm.reduction import Factor
from unisono.errors import MessageError

# PyTorch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GATHERING = 2**30  # the tag of an uneven gather's messages, above those that users may give
_FEW = 16  # ranks: up to so many, a message to each of them costs less than it saves

Tensor = torch.Tensor
Deliver = Callable[[torch.Tensor], None]


class C10dTransport:
    is_simulated = False

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self._group = group
        self._backend = backend
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)

    # ---- collectives that move data ------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> Transfer:
        wire, finish = self._moving(tensor)
        return Transfer(lambda: [dist.broadcast(wire, group=self._group, group_src=root, async_op=True)], finish)

    def all_gather(self, outs: Sequence[Tensor], tensor: Tensor) -> Transfer:
        mine, _ = self._moving(tensor)
        wires, finish = self._all_moving(outs)

        def start() -> list[dist.Work]:
            if len({out.shape for out in outs}) == 1:
                return [dist.all_gather(wires, mine, group=self._group, async_op=True)]
            wires[self._rank].copy_(mine)
            return [
                dist.broadcast(wire, group=self._group, group_src=root, async_op=True)
                for root, wire in enumerate(wires)
                if wire.numel()
            ]

        return Transfer(start, finish)

    def all_gather_into(self, out: Tensor, tensor: Tensor) -> Transfer:
        mine, _ = self._moving(tensor)
        wire, finish = self._moving(out)
        return Transfer(
            lambda: [all_gather_single(wire.reshape(-1), mine.reshape(-1), group=self._group, async_op=True)], finish
        )

    def gather_into(self, out: Tensor | None, tensor: Tensor, root: int) -> Transfer:
        mine, _ = self._moving(tensor)
        wires, finish = self._all_moving([] if out is None else out.unbind())
        return Transfer(
            lambda: [dist.gather(mine, wires or None, group=self._group, group_dst=root, async_op=True)], finish
        )

    def gather(self, outs: Sequence[Tensor], tensor: Tensor, root: int) -> Transfer:
        mine, _ = self._moving(tensor)
        wires, finish = self._all_moving(outs)

        def start() -> list[dist.Work]:
            if self._rank != root:
                works = [dist.isend(mine, group=self._group, group_dst=root, tag=_GATHERING)] if mine.numel() else []
            else:
                wires[root].copy_(mine)
                works = [
                    dist.irecv(wire, group=self._group, group_src=source, tag=_GATHERING)
                    for source, wire in enumerate(wires)
                    if source != root and wire.numel()
                ]
            return [work for work in works if work is not None]

        return Transfer(start, finish, is_mute=self._library(tensor) is GLOO)

    def scatter(self, out: Tensor, chunks: Sequence[Tensor] | Tensor | None, root: int) -> Transfer:
        wire, finish = self._moving(out)
        chunk_wires = None if chunks is None else [self._moving(chunk)[0] for chunk in chunks]
        return Transfer(
            lambda: [dist.scatter(wire, chunk_wires, group=self._group, group_src=root, async_op=True)], finish
        )

    def all_to_all(
        self, out: Tensor, tensor: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int], even: bool
    ) -> Transfer:
        mine, _ = self._moving(tensor)
        wire, finish = self._moving(out)
        row = math.prod(tensor.shape[1:]) * moved_elements(self._library(tensor), tensor.dtype)

        def start() -> list[dist.Work]:
            return [
                dist.all_to_all_single(
                    wire.reshape(-1),
                    mine.reshape(-1),
                    [rows * row for rows in recv_sizes],
                    [rows * row for rows in send_sizes],
                    group=self._group,
                    async_op=True,
                )
            ]

        return Transfer(start, finish)

    def barrier(self) -> Transfer:
        return Transfer(lambda: [dist.barrier(self._group, async_op=True)])

    # ---- reductions ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str, factor: Factor | None) -> Transfer:
        plan = plan_wire(self._library(tensor), op, tensor.dtype)
        wire = self._reducing(plan, tensor, factor)

        def deliver(reduced: Tensor) -> None:
            if reduced is not tensor:
                plan.from_wire(reduced, tensor.detach(), self._size)

        if plan.gathers:
            return self._gather_and_fold(plan, wire, deliver)
        return Transfer(
            lambda: [dist.all_reduce(wire, plan.wire_op, group=self._group, async_op=True)], lambda: deliver(wire)
        )

    def reduce(self, tensor: Tensor, root: int, op: str, factor: Factor | None) -> Transfer:
        plan = plan_wire(self._library(tensor), op, tensor.dtype)
        wire = self._reducing(plan, tensor, factor)

        def deliver(reduced: Tensor) -> None:
            if self._rank == root:
                plan.from_wire(reduced, tensor.detach(), self._size)

        if plan.gathers:
            return self._gather_and_fold(plan, wire, deliver)
        if self._rank != root and wire.data_ptr() == tensor.data_ptr():
            wire = wire.clone()  # gloo uses the other ranks' tensors as scratch
        return Transfer(
            lambda: [dist.reduce(wire, op=plan.wire_op, group=self._group, group_dst=root, async_op=True)],
            lambda: deliver(wire),
        )

    def reduce_scatter(
        self, out: Tensor, tensor: Tensor, sizes: Sequence[int], op: str, factor: Factor | None
    ) -> Transfer:
        plan = plan_wire(self._library(tensor), op, tensor.dtype)
        wire = self._reducing(plan, tensor, factor)

        def deliver(reduced: Tensor) -> None:
            if reduced is not out:
                plan.from_wire(reduced, out.detach(), self._size)

        if plan.gathers:
            return self._gather_and_fold(plan, wire, lambda reduced: deliver(reduced.split(list(sizes))[self._rank]))
        if len(set(sizes)) > 1:
            return self._reduce_each_part(plan, wire, list(sizes), deliver)
        if self._library(tensor) is GLOO and self._size <= _FEW and plan.is_plain:
            return self._exchange_and_fold(plan, wire, deliver)
        is_apart = out.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        arrives_there = is_apart and plan.is_plain and wire.device == out.device and out.is_contiguous()
        mine = out if arrives_there else wire.new_empty((sizes[self._rank], *wire.shape[1:]))
        return Transfer(
            lambda: [reduce_scatter_single(mine.detach(), wire, op=plan.wire_op, group=self._group, async_op=True)],
            lambda: deliver(mine),
        )

    def _reduce_each_part(self, plan: WirePlan, wire: Tensor, sizes: list[int], deliver: Deliver) -> Transfer:
        """A reduce-scatter into unequal parts: one reduction per part, to the rank that keeps it."""
        parts = list(wire.clone().split(sizes))

        def start() -> list[dist.Work]:
            return [
                dist.reduce(part, op=plan.wire_op, group=self._group, group_dst=root, async_op=True)
                for root, part in enumerate(parts)
                if part.numel()
            ]

        return Transfer(start, lambda: deliver(parts[self._rank]))

    def _exchange_and_fold(self, plan: WirePlan, wire: Tensor, deliver: Deliver) -> Transfer:
        """A reduce-scatter as an all_to_all of the parts, folded in rank order where they arrive.

        It moves as much as gloo's own reduce-scatter, in half the time.
        """
        came = torch.empty_like(wire)
        return Transfer(
            lambda: [dist.all_to_all_single(came.view(-1), wire.view(-1), group=self._group, async_op=True)],
            lambda: deliver(plan.fold_into_first(list(came.chunk(self._size)))),
        )

    def _gather_and_fold(self, plan: WirePlan, wire: Tensor, deliver: Deliver) -> Transfer:
        """A reduction that the library does not know: every rank gathers all parts and folds them in rank order."""
        mine, _ = self._moving(wire)
        parts = [torch.empty_like(wire) for _ in range(self._size)]
        wires, finish_parts = self._all_moving(parts)

        def finish() -> None:
            finish_parts()
            deliver(plan.fold(parts))

        return Transfer(lambda: [dist.all_gather(wires, mine, group=self._group, async_op=True)], finish)

    # ---- point to point ------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        wire, _ = self._moving(tensor)
        return Transfer(lambda: [self._group.send([wire], to, tag)], is_mute=self._library(tensor) is GLOO)

    def recv(self, tensor: Tensor, source: int | None, tag: int) -> Transfer:
        wire, finish = self._moving(tensor)
        is_mute = self._library(tensor) is GLOO
        mark = LengthMark(tensor, wire) if is_mute else None
        found = [source]

        def start() -> list[dist.Work]:
            assert source is not None
            return [self._group.recv([wire], source, tag)]

        def run() -> None:
            found[0] = dist.get_group_rank(self._group, dist.recv(wire, group=self._group, tag=tag))

        def checked() -> int | None:
            if mark is not None:
                mark.check(found[0])
            finish()
            return found[0]

        return Transfer(start, checked, run if source is None else None, is_mute)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Transfer:
        receiving = [(*self._moving(tensor), tensor, source) for tensor, source in recvs]
        sending = [(self._moving(tensor)[0], to) for tensor, to in sends]
        if not any(self._library(tensor) is GLOO for tensor, _ in (*sends, *recvs)):
            ops = [dist.P2POp(dist.isend, wire, group=self._group, group_peer=to) for wire, to in sending]
            ops += [
                dist.P2POp(dist.irecv, wire, group=self._group, group_peer=source) for wire, *_, source in receiving
            ]

            def finish_all() -> None:
                for _, finish, *_ in receiving:
                    finish()

            return Transfer(lambda: dist.batch_isend_irecv(ops) if ops else [], finish_all)
        marks = [LengthMark(tensor, wire) for wire, _, tensor, _ in receiving]

        def start() -> list[dist.Work]:
            # Receives first: a message that is expected need not ask for a buffer.
            works = [self._group.recv([wire], source, 0) for wire, *_, source in receiving]
            return works + [self._group.send([wire], to, 0) for wire, to in sending]

        def check_all() -> None:
            for mark, (_, finish, _, source) in zip(marks, receiving, strict=True):
                mark.check(source)
                finish()

        return Transfer(start, check_all, is_mute=True)

    # ---- tensors on the wire -------------------------------------------------------------------------------------

    def _library(self, tensor: Tensor) -> Library:
        return NCCL if tensor.is_cuda and self._backend == "nccl" else GLOO

    def _prepared(self, tensor: Tensor) -> Tensor:
        """The tensor's data contiguous, where the library reads it; its own memory where that is possible."""
        data = tensor.detach().resolve_conj().resolve_neg()
        if data.is_cuda and not self._library(tensor).takes_cuda:
            data = torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data)
        return data.contiguous()

    def _moving(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """What travels for `tensor` in an operation that moves data, and how to bring it back."""
        data = self._prepared(tensor)

        def finish() -> None:
            if data.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(data)

        return movable(self._library(tensor), data), finish

    def _all_moving(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        moving = [self._moving(tensor) for tensor in tensors]

        def finish() -> None:
            for _, finish_one in moving:
                finish_one()

        return [wire for wire, _ in moving], finish

    def _reducing(self, plan: WirePlan, tensor: Tensor, factor: Factor | None) -> Tensor:
        """What travels for `tensor` in a reduction."""
        if plan.is_plain and factor is None and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
            return tensor.detach() if tensor.requires_grad else tensor
        return plan.to_wire(self._prepared(tensor), factor)


_MARK = os.urandom(7) + b"\xa7"  # few numbers that people send end like this


class LengthMark:
    """The p2p length check: gloo takes a message that is shorter than the receiver's tensor for one that fits.

    Eight random bytes at the end of the receiver's memory are still there when the message did not reach them. (A
    message that is too long makes gloo abort the receiver: see watchdog/crash_note.py.)
    """

    def __init__(self, tensor: Tensor, wire: Tensor) -> None:
        """To be made before the message is expected. `wire` is the memory for `tensor`."""
        self._tensor = tensor
        self._end = wire.data_ptr() + wire.nbytes - len(_MARK) if wire.is_cpu and wire.nbytes >= len(_MARK) else None
        if self._end is not None:
            ctypes.memmove(self._end, _MARK, len(_MARK))

    def check(self, source: int | None) -> None:
        """The message has arrived: MessageError where it was too short."""
        if self._end is not None and ctypes.string_at(self._end, len(_MARK)) == _MARK:
            expected = f"recv expected {self._tensor.numel()} elements ({self._tensor.dtype})"
            raise MessageError(f"{expected}, but rank {source} sent fewer")
