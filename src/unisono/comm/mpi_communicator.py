"""The Communicator over MPI: collectives take the short way to MPI, round torch's dispatcher.

Whether a rank waits at once or later, it makes the same MPI calls, so ranks may differ in that. Imports mpi4py: import
it late.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch

from unisono.comm import mpi_calls as calls
from unisono.comm import traffic
from unisono.comm.collectives import UNEVEN, detail_of_op, detail_of_root
from unisono.comm.communicator import Communicator, Piece
from unisono.comm.handle import Handle
from unisono.comm.mpi_calls import Call
from unisono.comm.mpi_now import PLAIN, memory_of, soon_done
from unisono.comm.operation import Outcome
from unisono.comm.reduction import Factor, plan_reduction
from unisono.errors import UnisonoError

if TYPE_CHECKING:
    from unisono.comm.mpi_group import MPIProcessGroup


Memory = tuple[Any, Any]  # MPI's memory and datatype


class MPICommunicator(Communicator):
    """As Communicator; only quicker."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._mpi = cast("MPIProcessGroup", self.group)
        self._raw = self._mpi.comm

    def _do(
        self,
        op: str,
        detail: str,
        tensor: torch.Tensor | None,
        result: Any,
        async_op: bool,
        prompt: Callable[[], None],
        call: Callable[[], Call],
        depth: int = 3,
    ) -> Outcome:
        """Run `prompt`, or start `call` for a handle to wait for; either way the outcome is `result`."""
        log, watch = self._log, self._watch
        log.enter(op, detail, tensor, depth)
        if traffic.counters:
            traffic.note(op, self.size, tensor)
        try:
            if watch.check is not None:
                watch.check.agree(log)
            if async_op:
                return Handle([self._mpi.start(call())], lambda: result, watch.waiter(log))
            prompt()
        except RuntimeError as error:
            if isinstance(error, UnisonoError) and error.__cause__ is None:
                raise
            raise watch.explained(error) from error
        finally:
            log.left = log.count
        return result

    def _call(
        self,
        op: str,
        detail: str,
        tensor: torch.Tensor | None,
        result: Any,
        async_op: bool,
        call: Callable[[], Call],
    ) -> Outcome:
        """As `_do`, for calls that have no shorter way."""
        return self._do(op, detail, tensor, result, async_op, lambda: self._mpi.run_now(call()), call, depth=4)

    def _settle(
        self, op: str, detail: str, tensor: torch.Tensor, request: Any, frame: FrameType, always: bool = False
    ) -> None:
        """Wait for what was just started. Unless it is over soon, or `always`, it is written down meanwhile.

        Starting cannot block; and an operation that ends only when all ranks have come needs no telling once it ends.
        """
        log = self._log
        log.count = number = log.count + 1
        try:
            if always or not soon_done(request):
                log.append((number, op, detail, tensor.shape, tensor.dtype, frame.f_code, frame.f_lasti))
                if not (always and soon_done(request)):
                    request.Wait()
        except RuntimeError as error:
            raise self._watch.explained(error) from error
        log.left = number

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False) -> Outcome:
        if not 0 <= root < self.size:
            self._require_rank("root", root)
        if not async_op and self._watch.check is None and not traffic.counters:
            memory = memory_of(tensor)
            if memory is not None:
                request = self._raw.Ibcast(memory, root)
                self._settle("broadcast", f"root={root}" if root else "", tensor, request, sys._getframe(1), True)
                return tensor
        return self._do(
            "broadcast",
            detail_of_root(root),
            tensor,
            tensor,
            async_op,
            lambda: self._mpi.broadcast_now(tensor, root),
            lambda: calls.broadcast(tensor, root, self.rank),
        )

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, factor: Factor | None = None, async_op: bool = False
    ) -> Outcome:
        dtype = tensor.dtype
        plain = PLAIN.get((dtype, op))
        if (
            plain is not None
            and not async_op
            and self._watch.check is None
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            return self._all_reduce_plain(tensor, tensor.shape, dtype, op, plain, sys._getframe(1))
        plan_reduction(op, dtype)
        return self._do(
            "all_reduce",
            detail_of_op(op),
            tensor,
            tensor,
            async_op,
            lambda: self._mpi.all_reduce_now(tensor, op, factor),
            lambda: calls.all_reduce(tensor, op, factor, self.size),
        )

    def _all_reduce_plain(
        self,
        tensor: torch.Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        op: str,
        plain: tuple[Any, Any, Any],
        frame: FrameType,
    ) -> torch.Tensor:
        """The commonest call of all, with nothing done twice: numbers that MPI adds up where they lie."""
        log = self._log
        if traffic.counters:
            traffic.note("all_reduce", self.size, tensor)
        try:
            requests = self._mpi.start_in_place(tensor.data_ptr(), shape.numel(), plain)
            log.count = number = log.count + 1
            if len(requests) > 1 or not soon_done(requests[0]):
                log.append((number, "all_reduce", detail_of_op(op), shape, dtype, frame.f_code, frame.f_lasti))
                for request in requests:
                    request.Wait()
        except RuntimeError as error:
            raise self._watch.explained(error) from error
        log.left = number
        return tensor

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        factor: Factor | None = None,
        async_op: bool = False,
    ) -> Outcome:
        self._require_rank("root", root)
        plan_reduction(op, tensor.dtype)
        return self._do(
            "reduce",
            detail_of_op(op) + detail_of_root(root),
            tensor,
            tensor,
            async_op,
            lambda: self._mpi.reduce_now(tensor, root, op, factor),
            lambda: calls.reduce(tensor, root, op, factor, self.rank, self.size),
        )

    def all_gather(self, tensor: torch.Tensor, *, uneven: bool = False, async_op: bool = False) -> Outcome:
        if not uneven:
            joined = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            return self._do(
                "all_gather",
                "",
                tensor,
                list(joined.unbind()),
                async_op,
                lambda: self._mpi.all_gather_now(joined, tensor),
                lambda: calls.all_gather_single(joined, tensor, self.rank, self.size),
            )
        pieces = [tensor.new_empty(shape) for shape in self._shapes(tensor)]
        return self._do(
            "all_gather",
            UNEVEN,
            tensor,
            pieces,
            async_op,
            lambda: self._mpi.all_gather_parts_now(pieces, tensor),
            lambda: calls.all_gather(pieces, tensor, self.rank, self.size),
        )

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Outcome:
        self._require_room(out, tensor)
        if not async_op and self._watch.check is None and not traffic.counters:
            received, sent = memory_of(out), memory_of(tensor)
            if received is not None and sent is not None and apart(received, sent):
                request = self._raw.Iallgather(sent, received)
                self._settle("all_gather_into", "", tensor, request, sys._getframe(1))
                return out
        return self._do(
            "all_gather_into",
            "",
            tensor,
            out,
            async_op,
            lambda: self._mpi.all_gather_now(out, tensor),
            lambda: calls.all_gather_single(out, tensor, self.rank, self.size),
        )

    def gather(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        uneven: bool = False,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Outcome:
        self._require_rank("root", root)
        is_root = self.rank == root
        if not uneven:
            if not async_op and self._watch.check is None and not traffic.counters:
                sent = memory_of(tensor)
                received = memory_of(out) if is_root and out is not None else None
                if sent is not None and (not is_root or fits(received, out, sent, tensor, self.size)):
                    request = self._raw.Igather(sent, received, root)
                    self._settle("gather", detail_of_root(root), tensor, request, sys._getframe(1), always=True)
                    return out if is_root else None
            joined = self._gathering_place(out, tensor) if is_root else None
            pieces: Any = joined if joined is None or out is not None else list(joined.unbind())
            return self._call(
                "gather",
                detail_of_root(root),
                tensor,
                pieces,
                async_op,
                lambda: calls.gather_even(joined, tensor, root),
            )
        shapes = self._shapes(tensor)
        parts = [tensor.new_empty(shape) for shape in shapes] if is_root else []
        return self._call(
            "gather",
            UNEVEN + detail_of_root(root),
            tensor,
            parts if is_root else None,
            async_op,
            lambda: calls.gather(parts, tensor, root, self.rank, self.size),
        )

    def scatter(
        self,
        out: torch.Tensor,
        chunks: Sequence[torch.Tensor] | torch.Tensor | None = None,
        root: int = 0,
        *,
        async_op: bool = False,
    ) -> Outcome:
        self._require_rank("root", root)
        if not async_op and self._watch.check is None and not traffic.counters:
            received = memory_of(out)
            rows = chunks if isinstance(chunks, torch.Tensor) else None
            sent = memory_of(rows) if self.rank == root and rows is not None else None
            if received is not None and (self.rank != root or fits(sent, rows, received, out, self.size)):
                request = self._raw.Iscatter(sent, received, root)
                self._settle("scatter", detail_of_root(root), out, request, sys._getframe(1), always=True)
                return out
        whole = joined_view(self._require_chunks(out, chunks)) if self.rank == root else None
        return self._call(
            "scatter", detail_of_root(root), out, out, async_op, lambda: calls.scatter_even(out, whole, root)
        )

    def exchange(self, sends: Sequence[Piece] = (), recvs: Sequence[Piece] = (), *, async_op: bool = False) -> Outcome:
        for _, peer in (*sends, *recvs):
            self._require_peer(peer)
        log, watch = self._letters, self._watch
        received = [tensor for tensor, _ in recvs]
        if not async_op and not traffic.counters:
            into, of = [memory_of(tensor) for tensor in received], [memory_of(tensor) for tensor, _ in sends]
            if None not in into and None not in of:
                requests = [self._raw.Irecv(place, source) for place, (_, source) in zip(into, recvs, strict=True)]
                requests += [self._raw.Isend(piece, to) for piece, (_, to) in zip(of, sends, strict=True)]
                log.enter("exchange", "", None, 2)
                try:
                    for request in requests:
                        if not soon_done(request):
                            request.Wait()
                except RuntimeError as error:
                    raise watch.explained(error) from error
                log.left = log.count
                return received
        if traffic.counters:
            for tensor, _ in sends:
                traffic.note("send", self.size, tensor)
        peers = ",".join(str(peer) for peer in sorted({peer for _, peer in (*sends, *recvs)}))
        log.enter(f"exchange with ranks {peers}", "", None, 2)
        made = [calls.receive(tensor, source, 0) for tensor, source in recvs]
        made += [calls.send(tensor, to, 0) for tensor, to in sends]
        try:
            if async_op:
                return Handle([self._mpi.start(call) for call in made], lambda: received, watch.waiter(log))
            self._mpi.run_together(made)
        except RuntimeError as error:
            raise watch.explained(error) from error
        finally:
            log.left = log.count
        return received

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
        plan_reduction(op, tensor.dtype)
        out = self._room("reduce_scatter", out, tensor, parts[self.rank])
        even = len(set(parts)) == 1
        plain = PLAIN.get((tensor.dtype, op))
        if even and plain is not None and not async_op and self._watch.check is None and not traffic.counters:
            received, sent = memory_of(out), memory_of(tensor)
            if received is not None and sent is not None and apart(received, sent):
                _, datatype, mpi_op = plain
                start = self._raw.Ireduce_scatter_block
                request = start((sent[0], datatype), (received[0], datatype), mpi_op)
                self._settle("reduce_scatter", detail_of_op(op), tensor, request, sys._getframe(1))
                return out
        pieces = () if even else tensor.split(parts)

        def prompt() -> None:
            if even:
                self._mpi.reduce_scatter_now(out, tensor, op, factor)
            else:
                self._mpi.reduce_scatter_parts_now(out, pieces, op, factor)

        def call() -> Call:
            if even:
                return calls.reduce_scatter_single(out, tensor, op, factor, self.rank, self.size)
            return calls.reduce_scatter(out, pieces, op, factor, self.rank, self.size)

        return self._do("reduce_scatter", detail_of_op(op), tensor, out, async_op, prompt, call)

    def all_to_all(
        self,
        tensor: torch.Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Outcome:
        even = send_sizes is None and recv_sizes is None
        if even and out is not None and not async_op and self._watch.check is None and not traffic.counters:
            received, sent = memory_of(out), memory_of(tensor)
            if received is not None and sent is not None and apart(received, sent):
                shape = tensor.shape
                if shape and shape[0] % self.size == 0 and out.shape == shape and out.dtype == tensor.dtype:
                    request = self._raw.Ialltoall(sent, received)
                    self._settle("all_to_all", "", tensor, request, sys._getframe(1))
                    return out
        outgoing = self._parts("all_to_all", tensor, send_sizes)
        incoming = self._incoming(outgoing, send_sizes, recv_sizes)
        out = self._room("all_to_all", out, tensor, sum(incoming))
        return self._do(
            "all_to_all",
            "" if even else UNEVEN,
            tensor,
            out,
            async_op,
            lambda: self._mpi.all_to_all_now(out, tensor, *(() if even else (incoming, outgoing))),
            lambda: (
                calls.all_to_all_even(out, tensor, self.size)
                if even
                else calls.all_to_all_single(out, tensor, incoming, outgoing, self.size)
            ),
        )

    def barrier(self, *, async_op: bool = False) -> Outcome:
        return self._do("barrier", "", None, None, async_op, self._mpi.barrier_now, calls.barrier)


def fits(whole: Memory | None, of_whole: torch.Tensor | None, part: Memory, of_part: torch.Tensor, ranks: int) -> bool:
    """Whether `whole` is memory for one part a rank, apart from the part itself."""
    if whole is None or of_whole is None or of_whole.dtype != of_part.dtype:
        return False
    return whole[0].nbytes == ranks * part[0].nbytes and of_whole.shape[:1] == (ranks,) and apart(whole, part)


def apart(one: Memory, other: Memory) -> bool:
    """Whether two pieces of memory do not overlap, which MPI forbids."""
    first, second = one[0], other[0]
    return first.address + first.nbytes <= second.address or second.address + second.nbytes <= first.address


def joined_view(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The chunks one after the other in memory: as they are, where they lie so in one storage, else copied together."""
    first = chunks[0]
    start, step, storage = first.data_ptr(), first.nbytes, first.untyped_storage().data_ptr()
    lie_so = all(
        chunk.is_contiguous()
        and chunk.data_ptr() == start + number * step
        and chunk.untyped_storage().data_ptr() == storage  # others may lie there by chance
        and not chunk.is_conj()
        and not chunk.is_neg()
        for number, chunk in enumerate(chunks)
    )
    if lie_so:
        return first.detach().as_strided((len(chunks) * first.numel(),), (1,), first.storage_offset())
    return torch.stack([chunk.detach() for chunk in chunks])
