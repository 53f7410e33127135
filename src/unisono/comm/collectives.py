"""The collectives of a Communicator on tensors.

Each method brings its tensors into a form that the carrier takes (contiguous, on its device, of its dtypes), starts
the operation on torch's process group, and brings the outcome back. The outcome does not depend on the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from unisono.comm.backends import GLOO, Carriage, moved_elements
from unisono.comm.log import UNEVEN, detail_of_op, detail_of_root
from unisono.comm.operation import Operations, Outcome, whole_numbers
from unisono.comm.reduction import Factor
from unisono.errors import UsageError

# PyTorch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GATHERING = 2**30  # the tag of an uneven gather's messages, which must not meet the user's own
_FEW = 16  # ranks: up to so many, a message to each of them costs less than it saves


class Collectives(Operations):
    """Operations in which every rank of the group takes part. Roots are ranks of the group."""

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False) -> Outcome:
        """Every rank's tensor becomes the root's."""
        self._require_rank("root", root)
        wire, finish = self._moving(tensor)

        def start() -> list[dist.Work]:
            return [dist.broadcast(wire, group=self.group, group_src=root, async_op=True)]

        return self._run("broadcast", tensor, start, finish, async_op, detail_of_root(root))

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, factor: Factor | None = None, async_op: bool = False
    ) -> Outcome:
        """Every rank's tensor becomes the reduction of all. `factor` is for op="premul_sum"."""
        carriage = self._carriage(tensor, op)
        wire = self._reducing(carriage, tensor, factor)

        def deliver(reduced: torch.Tensor) -> torch.Tensor:
            if reduced is not tensor:
                carriage.from_wire(reduced, tensor.detach(), self.size)
            return tensor

        if carriage.gathers:
            return self._gather_and_fold("all_reduce", tensor, carriage, wire, deliver, async_op)

        def start() -> list[dist.Work]:
            return [dist.all_reduce(wire, carriage.wire_op, group=self.group, async_op=True)]

        return self._run("all_reduce", tensor, start, lambda: deliver(wire), async_op, detail_of_op(op))

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        factor: Factor | None = None,
        async_op: bool = False,
    ) -> Outcome:
        """The root's tensor becomes the reduction of all; the others keep theirs."""
        self._require_rank("root", root)
        carriage = self._carriage(tensor, op)
        wire = self._reducing(carriage, tensor, factor)

        def deliver(reduced: torch.Tensor) -> torch.Tensor:
            if self.rank == root:
                carriage.from_wire(reduced, tensor.detach(), self.size)
            return tensor

        if carriage.gathers:
            return self._gather_and_fold("reduce", tensor, carriage, wire, deliver, async_op)
        if self.rank != root and wire.data_ptr() == tensor.data_ptr():
            wire = wire.clone()  # gloo uses the other ranks' tensors as scratch

        def start() -> list[dist.Work]:
            return [dist.reduce(wire, op=carriage.wire_op, group=self.group, group_dst=root, async_op=True)]

        return self._run(
            "reduce", tensor, start, lambda: deliver(wire), async_op, detail_of_op(op) + detail_of_root(root)
        )

    def all_gather(self, tensor: torch.Tensor, *, uneven: bool = False, async_op: bool = False) -> Outcome:
        """A list of every rank's tensor. With `uneven` the shapes may differ; else they must be equal."""
        mine, _ = self._moving(tensor)
        shapes = self._shapes(tensor) if uneven else [tuple(tensor.shape)] * self.size
        pieces = [self._moving(tensor.new_empty(shape)) for shape in shapes]
        wires = [wire for wire, _ in pieces]

        def start() -> list[dist.Work]:
            if len(set(shapes)) == 1:
                return [dist.all_gather(wires, mine, group=self.group, async_op=True)]
            wires[self.rank].copy_(mine)
            return [
                dist.broadcast(wire, group=self.group, group_src=root, async_op=True)
                for root, wire in enumerate(wires)
                if wire.numel()
            ]

        def finish() -> list[torch.Tensor]:
            return [finish_piece() for _, finish_piece in pieces]

        return self._run("all_gather", tensor, start, finish, async_op, UNEVEN if uneven else "")

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Outcome:
        """`out` becomes all ranks' tensors one after the other along dim 0; the quick form for equal shapes."""
        self._require_room(out, tensor)
        mine, _ = self._moving(tensor)
        wire, finish = self._moving(out)

        def start() -> list[dist.Work]:
            return [_all_gather_single(wire.reshape(-1), mine.reshape(-1), group=self.group, async_op=True)]

        return self._run("all_gather_into", tensor, start, finish, async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        uneven: bool = False,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Outcome:
        """On the root a list of every rank's tensor, None elsewhere. With `uneven` the shapes may differ.

        `out`, which the root may pass where they do not, is the place for all, (size, *shape), and then the outcome.
        """
        self._require_rank("root", root)
        mine, _ = self._moving(tensor)
        shapes = self._shapes(tensor) if uneven else [tuple(tensor.shape)] * self.size
        is_root = self.rank == root
        places = list(self._gathering_place(out, tensor)) if is_root and not uneven else []
        places = places or ([tensor.new_empty(shape) for shape in shapes] if is_root else [])
        pieces = [self._moving(place) for place in places]
        wires = [wire for wire, _ in pieces]

        def start() -> list[dist.Work]:
            if len(set(shapes)) == 1:
                return [dist.gather(mine, wires or None, group=self.group, group_dst=root, async_op=True)]
            if not is_root:
                works = [dist.isend(mine, group=self.group, group_dst=root, tag=_GATHERING)] if mine.numel() else []
            else:
                wires[root].copy_(mine)
                works = [
                    dist.irecv(wire, group=self.group, group_src=source, tag=_GATHERING)
                    for source, wire in enumerate(wires)
                    if source != root and wire.numel()
                ]
            return [work for work in works if work is not None]

        def finish() -> list[torch.Tensor] | torch.Tensor | None:
            finished = [finish_piece() for _, finish_piece in pieces]
            return (finished if out is None or uneven else out) if is_root else None

        detail = (UNEVEN if uneven else "") + detail_of_root(root)
        is_mute = self._carrier(tensor) is GLOO and len(set(shapes)) > 1
        return self._run("gather", tensor, start, finish, async_op, detail, is_mute=is_mute)

    def scatter(
        self,
        out: torch.Tensor,
        chunks: Sequence[torch.Tensor] | torch.Tensor | None = None,
        root: int = 0,
        *,
        async_op: bool = False,
    ) -> Outcome:
        """`out` becomes chunks[rank] of the root; only the root passes `chunks`, a list or one tensor of rows."""
        self._require_rank("root", root)
        wire, finish = self._moving(out)
        given = self._require_chunks(out, chunks) if self.rank == root else []
        chunk_wires = [self._moving(chunk)[0] for chunk in given] if self.rank == root else None

        def start() -> list[dist.Work]:
            return [dist.scatter(wire, chunk_wires, group=self.group, group_src=root, async_op=True)]

        return self._run("scatter", out, start, finish, async_op, detail_of_root(root))

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
        """This rank's part of the reduction: dim 0 is cut into equal parts, or into `sizes`. `out` saves the memory."""
        parts = self._parts("reduce_scatter", tensor, sizes)
        carriage = self._carriage(tensor, op)
        wire = self._reducing(carriage, tensor, factor)
        is_ours = out is None  # else it may be a part of `tensor`
        out = self._room("reduce_scatter", out, tensor, parts[self.rank])

        def deliver(reduced: torch.Tensor) -> torch.Tensor:
            if reduced is not out:
                carriage.from_wire(reduced, out.detach(), self.size)
            return out

        if carriage.gathers:

            def deliver_part(reduced: torch.Tensor) -> torch.Tensor:
                return deliver(reduced.split(parts)[self.rank])

            return self._gather_and_fold("reduce_scatter", tensor, carriage, wire, deliver_part, async_op)
        if len(set(parts)) > 1:
            return self._reduce_each_part(tensor, carriage, wire, parts, deliver, async_op)
        if self._carrier(tensor) is GLOO and self.size <= _FEW and carriage.is_plain:
            return self._exchange_and_fold(tensor, carriage, wire, deliver, async_op, detail_of_op(op))
        arrives_there = is_ours and carriage.is_plain and wire.device == out.device
        mine = out if arrives_there else wire.new_empty((parts[self.rank], *wire.shape[1:]))

        def start() -> list[dist.Work]:
            return [_reduce_scatter_single(mine, wire, op=carriage.wire_op, group=self.group, async_op=True)]

        return self._run("reduce_scatter", tensor, start, lambda: deliver(mine), async_op, detail_of_op(op))

    def all_to_all(
        self,
        tensor: torch.Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Outcome:
        """Part r of dim 0 goes to rank r; returns what came, in the order of ranks.

        Parts are equal, or `send_sizes` long; `recv_sizes`, where they are not given, are asked of the others first.
        `out` saves the memory for the outcome.
        """
        outgoing = self._parts("all_to_all", tensor, send_sizes)
        incoming = self._incoming(outgoing, send_sizes, recv_sizes)
        out = self._room("all_to_all", out, tensor, sum(incoming))
        mine, _ = self._moving(tensor)
        wire, finish = self._moving(out)
        row = math.prod(tensor.shape[1:]) * moved_elements(self._carrier(tensor), tensor.dtype)

        def start() -> list[dist.Work]:
            return [
                dist.all_to_all_single(
                    wire.reshape(-1),
                    mine.reshape(-1),
                    [rows * row for rows in incoming],
                    [rows * row for rows in outgoing],
                    group=self.group,
                    async_op=True,
                )
            ]

        return self._run(
            "all_to_all",
            tensor,
            start,
            finish,
            async_op,
            UNEVEN if send_sizes is not None or recv_sizes is not None else "",
        )

    def barrier(self, *, async_op: bool = False) -> Outcome:
        """Nobody leaves before everybody has come."""
        return self._run("barrier", None, lambda: [dist.barrier(self.group, async_op=True)], lambda: None, async_op)

    def _require_room(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        for each in (out, tensor):
            self._require_numbers(each)
        if out.numel() != tensor.numel() * self.size or out.dtype != tensor.dtype:
            raise UsageError(
                f"all_gather_into: out is {out.dtype} of {out.numel()} elements; expected {tensor.dtype} of "
                f"{self.size} x {tensor.numel()}"
            )

    def _gathering_place(self, out: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
        """Where the root gathers tensors of equal shape, one after the other."""
        shape = (self.size, *tensor.shape)
        if out is None:
            return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        if out.shape != shape or out.dtype != tensor.dtype or not out.is_contiguous():
            raise UsageError(
                f"gather: out is {out.dtype} {tuple(out.shape)}; expected {tensor.dtype} {shape}, contiguous"
            )
        return out

    def _require_chunks(
        self, out: torch.Tensor, chunks: Sequence[torch.Tensor] | torch.Tensor | None
    ) -> list[torch.Tensor]:
        shape, dtype = out.shape, out.dtype
        chunks = () if chunks is None else chunks
        if not isinstance(chunks, (Sequence, torch.Tensor)):
            raise UsageError(f"scatter: the root needs {self.size} tensors or one of {self.size} rows, not {chunks!r}")
        for chunk in chunks:
            self._require_numbers(chunk)
        if len(chunks) != self.size or any(chunk.shape != shape or chunk.dtype != dtype for chunk in chunks):
            given = [(chunk.dtype, tuple(chunk.shape)) for chunk in chunks]
            raise UsageError(
                f"scatter: the root needs {self.size} chunks of {out.dtype} {tuple(out.shape)}, but got {given}"
            )
        return list(chunks if chunks is not None else ())

    def _incoming(
        self, outgoing: list[int], send_sizes: Sequence[int] | None, recv_sizes: Sequence[int] | None
    ) -> list[int]:
        """How many rows come from each rank."""
        if recv_sizes is not None:
            whole = whole_numbers("all_to_all: recv_sizes", recv_sizes)
            if len(whole) != self.size or min(whole) < 0:
                raise UsageError(f"all_to_all: recv_sizes {whole}; expected {self.size} sizes of at least 0")
            if whole[self.rank] != outgoing[self.rank]:
                raise UsageError(
                    f"all_to_all: rank {self.rank} sends {outgoing[self.rank]} to itself, but recv_sizes {whole} has "
                    f"{whole[self.rank]} at that place"
                )
            if self._watch.check is not None and (sent := self._asked_of_others(outgoing)) != whole:
                raise UsageError(f"all_to_all: recv_sizes {whole}, but the others send {sent}")
            return whole
        return outgoing if send_sizes is None else self._asked_of_others(outgoing)

    def _asked_of_others(self, outgoing: list[int]) -> list[int]:
        sizes = torch.tensor(outgoing)
        told = torch.empty_like(sizes)
        dist.all_to_all_single(told, sizes, group=self.group)
        return told.tolist()

    def _reduce_each_part(
        self,
        tensor: torch.Tensor,
        carriage: Carriage,
        wire: torch.Tensor,
        parts: list[int],
        deliver: Callable[[torch.Tensor], torch.Tensor],
        async_op: bool,
    ) -> Outcome:
        """A reduce-scatter into unequal parts: one reduction a part, to the rank that keeps it."""
        part_wires = list(wire.clone().split(parts))

        def start() -> list[dist.Work]:
            return [
                dist.reduce(part, op=carriage.wire_op, group=self.group, group_dst=root, async_op=True)
                for root, part in enumerate(part_wires)
                if part.numel()
            ]

        return self._run("reduce_scatter", tensor, start, lambda: deliver(part_wires[self.rank]), async_op, depth=4)

    def _exchange_and_fold(
        self,
        tensor: torch.Tensor,
        carriage: Carriage,
        wire: torch.Tensor,
        deliver: Callable[[torch.Tensor], torch.Tensor],
        async_op: bool,
        detail: str,
    ) -> Outcome:
        """A reduce-scatter as every rank's parts sent to those who keep them, and folded there in rank order.

        It moves as much as gloo's own reduce-scatter, in half the time.
        """
        came = torch.empty_like(wire)

        def start() -> list[dist.Work]:
            return [dist.all_to_all_single(came.view(-1), wire.view(-1), group=self.group, async_op=True)]

        def finish() -> torch.Tensor:
            return deliver(carriage.fold_into_first(list(came.chunk(self.size))))

        return self._run("reduce_scatter", tensor, start, finish, async_op, detail, depth=4)

    def _gather_and_fold(
        self,
        op: str,
        tensor: torch.Tensor,
        carriage: Carriage,
        wire: torch.Tensor,
        deliver: Callable[[torch.Tensor], torch.Tensor],
        async_op: bool,
    ) -> Outcome:
        """A reduction that the carrier does not know: every rank gathers all and folds them in rank order."""
        mine, _ = self._moving(wire)
        pieces = [self._moving(torch.empty_like(wire)) for _ in range(self.size)]

        def start() -> list[dist.Work]:
            return [dist.all_gather([piece for piece, _ in pieces], mine, group=self.group, async_op=True)]

        def finish() -> torch.Tensor:
            return deliver(carriage.fold([finish_piece() for _, finish_piece in pieces]))

        return self._run(op, tensor, start, finish, async_op, depth=4)
