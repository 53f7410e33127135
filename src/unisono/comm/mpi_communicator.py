"""The Communicator over MPI: collectives take the short way to MPI, round torch's dispatcher.

Whether a rank waits at once or later, it makes the same MPI calls, so ranks may differ in that. Imports mpi4py: import
it late.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from mpi4py import MPI

from unisono.comm import mpi_buffer, traffic
from unisono.comm import mpi_calls as calls
from unisono.comm.handle import Handle
from unisono.comm.log import UNEVEN, detail_of_op, detail_of_root
from unisono.comm.mpi_calls import Call
from unisono.comm.mpi_memory import Memory, Pair, joined_view, memory_of, pair_of
from unisono.comm.mpi_messages import MPIMessages, is_own
from unisono.comm.mpi_now import LOOKS, PLAIN, Plain
from unisono.comm.operation import Outcome
from unisono.comm.reduction import Factor, plan_reduction, require_op
from unisono.errors import UsageError

IN_PLACE, address_of = MPI.IN_PLACE, MPI.memory.fromaddress


class MPICommunicator(MPIMessages):
    """As Communicator; only quicker."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._start_all_reduce = self._raw.Iallreduce
        self._is_plain = self._watch.check is None

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
        if tensor is not None:
            self._require_numbers(tensor)
        log.enter(op, detail, tensor, depth)
        if traffic.counters:
            traffic.note(op, self.size, tensor, self.ranks)
        try:
            if watch.check is not None:
                watch.check.agree(log)
            if async_op:
                return Handle([self._mpi.start(call())], lambda: result, watch.waiter(log))
            prompt()
        except UsageError:
            log.withdraw()
            raise
        except RuntimeError as error:
            if is_own(error):
                raise
            raise watch.explained(error) from error
        finally:
            log.left = log.entered
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

    def _settle(self, op: str, detail: str, memory: Memory | Pair, request: Any, frame: FrameType) -> None:
        """Wait for what was just started, which cannot block, and write it down meanwhile."""
        log = self._log
        log.entered += 1
        log.append((log.count, op, detail, memory.shape, memory.dtype, frame.f_code, frame.f_lasti, log.quick))
        try:
            test = request.Test
            for _ in LOOKS:  # `soon_done` written out: a call more is felt here
                if test():
                    break
            else:
                request.Wait()
        except RuntimeError as error:
            raise self._watch.explained(error) from error
        log.left = log.entered

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False) -> Outcome:
        if root.__class__ is not int or not 0 <= root < self.size:
            self._require_rank("root", root)
        if self._is_plain and not async_op and not traffic.counters:
            memory = memory_of(tensor)
            if memory is not None:
                request = self._raw.Ibcast(memory.buffer, root)
                self._settle("broadcast", detail_of_root(root), memory, request, sys._getframe(1))
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
        try:
            plain = PLAIN.get((tensor.dtype, op)) if isinstance(tensor, torch.Tensor) else None
        except TypeError:  # an op that cannot be looked up is none
            plain = None
        if (
            plain is not None
            and not async_op
            and self._is_plain
            and factor is None
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            return self._all_reduce_plain(tensor, op, plain)
        self._require_reduction(tensor, op, factor)
        return self._do(
            "all_reduce",
            detail_of_op(op),
            tensor,
            tensor,
            async_op,
            lambda: self._mpi.all_reduce_now(tensor, op, factor),
            lambda: calls.all_reduce(tensor, op, factor, self.size),
        )

    def _all_reduce_plain(self, tensor: torch.Tensor, op: str, plain: Plain) -> torch.Tensor:
        """The commonest call of all, with nothing done twice: numbers that MPI adds up where they lie.

        One that is over soon, before anybody could want to know more, is only counted.
        """
        log = self._log
        if traffic.counters:
            traffic.note("all_reduce", self.size, tensor, self.ranks)
        count = tensor.numel()
        try:
            if count <= mpi_buffer.AT_ONCE:
                itemsize, datatype, mpi_op = plain
                buffer = address_of(tensor.data_ptr(), count * itemsize), datatype
                request = self._start_all_reduce(IN_PLACE, buffer, mpi_op)
                test = request.Test
                for _ in LOOKS:  # `soon_done` written out: a call more is felt here
                    if test():
                        if count == log.run_elements and plain is log.run_kind:
                            log.quick += 1
                        else:
                            log.begin_run(tensor, count, plain)
                        return tensor
                requests = [request]
            else:
                requests = self._mpi.start_in_place(tensor.data_ptr(), count, plain)
            log.enter("all_reduce", detail_of_op(op), tensor, 3)
            for request in requests:
                request.Wait()
        except RuntimeError as error:
            raise self._watch.explained(error) from error
        log.left = log.entered
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
        self._require_reduction(tensor, op, factor)
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
        self._require_numbers(tensor)
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
        if self._is_plain and not async_op and not traffic.counters:
            pair = pair_of(out, tensor)
            if pair is not None and pair.received.nbytes == pair.sent.nbytes * self.size:
                request = self._raw.Iallgather(pair.of, pair.into)
                self._settle("all_gather_into", "", pair, request, sys._getframe(1))
                return out
        self._require_room(out, tensor)
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
        if root.__class__ is not int or not 0 <= root < self.size:
            self._require_rank("root", root)
        is_root = self.rank == root
        if not uneven:
            if self._is_plain and not async_op and not traffic.counters:
                if not is_root:
                    sent = memory_of(tensor)
                    if sent is not None:
                        request = self._raw.Igather(sent.buffer, None, root)
                        self._settle("gather", f"root={root}" if root else "", sent, request, sys._getframe(1))
                        return None
                elif out is not None:
                    pair = pair_of(out, tensor)
                    if pair is not None and pair.rows_received == self.size:
                        request = self._raw.Igather(pair.of, pair.into, root)
                        self._settle("gather", f"root={root}" if root else "", pair, request, sys._getframe(1))
                        return out
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
        if root.__class__ is not int or not 0 <= root < self.size:
            self._require_rank("root", root)
        if self._is_plain and not async_op and not traffic.counters:
            if self.rank != root:
                received = memory_of(out)
                if received is not None:
                    request = self._raw.Iscatter(None, received.buffer, root)
                    self._settle("scatter", detail_of_root(root), received, request, sys._getframe(1))
                    return out
            elif isinstance(chunks, torch.Tensor):
                pair = pair_of(out, chunks)
                if pair is not None and pair.rows_sent == self.size:
                    request = self._raw.Iscatter(pair.of, pair.into, root)
                    self._settle("scatter", detail_of_root(root), pair.received, request, sys._getframe(1))
                    return out
        whole = joined_view(self._require_chunks(out, chunks)) if self.rank == root else None
        return self._call(
            "scatter", detail_of_root(root), out, out, async_op, lambda: calls.scatter_even(out, whole, root)
        )

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
        if (
            out is not None
            and sizes is None
            and factor is None
            and self._is_plain
            and not async_op
            and not traffic.counters
        ):
            pair = pair_of(out, tensor)
            is_even = pair is not None and pair.parts == self.size and isinstance(op, str)
            plain = PLAIN.get((pair.dtype, op)) if pair is not None and is_even else None
            if pair is not None and plain is not None:
                _, datatype, mpi_op = plain
                start = self._raw.Ireduce_scatter_block
                request = start((pair.of[0], datatype), (pair.into[0], datatype), mpi_op)
                self._settle("reduce_scatter", detail_of_op(op), pair, request, sys._getframe(1))
                return out
        parts = self._parts("reduce_scatter", tensor, sizes)
        self._require_reduction(tensor, op, factor)
        out = self._room("reduce_scatter", out, tensor, parts[self.rank])
        even = len(set(parts)) == 1
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
        if even and out is not None and self._is_plain and not async_op and not traffic.counters:
            pair = pair_of(out, tensor)
            if pair is not None and pair.alike and pair.shape and pair.shape[0] % self.size == 0:
                request = self._raw.Ialltoall(pair.of, pair.into)
                self._settle("all_to_all", "", pair, request, sys._getframe(1))
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

    def _require_reduction(self, tensor: torch.Tensor, op: str, factor: Factor | None) -> None:
        self._require_numbers(tensor)
        require_op(op)
        plan_reduction(op, tensor.dtype).require_factor(tensor, factor)

    def barrier(self, *, async_op: bool = False) -> Outcome:
        return self._do("barrier", "", None, None, async_op, self._mpi.barrier_now, calls.barrier)
