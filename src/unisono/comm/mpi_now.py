"""The short way to MPI, round c10d: one MPI call and a wait, no Work, as little Python as possible.

MPI does not match a blocking collective on one rank with a non-blocking one on another, and one rank of a program may
well wait at once where another goes on. So these start the non-blocking call, as the c10d calls do, and wait for it;
that costs less than a microsecond more. Imports mpi4py: import it late.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from unisono.comm import mpi_buffer
from unisono.comm import mpi_calls as calls
from unisono.comm.mpi_buffer import CARRIERS, NUMBERS, OPS, Buffer, is_direct
from unisono.comm.mpi_calls import STARTERS, Call
from unisono.comm.mpi_work import failure, wait_for_devices
from unisono.comm.reduction import DTYPES, HALVES, MEANINGFUL, Factor, plan_reduction

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]

_address = MPI.memory.fromaddress
# How often to ask before blocking: up to 0.1 ms. MPI's own wait gives the core away too soon for that.
LOOKS = range(300)


def _reductions_in_place() -> dict[tuple[torch.dtype, str], tuple[MPI.Datatype, MPI.Op]]:
    found = {}
    for dtype in DTYPES - HALVES:
        for op in MEANINGFUL:
            if dtype in MEANINGFUL[op] and op not in ("avg", "premul_sum"):
                reduction = plan_reduction(op, dtype)
                found[dtype, op] = NUMBERS[reduction.wire_dtype], OPS[reduction.wire_op]
    return found


# The (dtype, op) that MPI can do on a tensor's own memory, in MPI's words.
_PLAIN = _reductions_in_place()
Plain = tuple[int, MPI.Datatype, MPI.Op]
# The same, with the bytes of a number, without the complex ones, which may be conjugates.
PLAIN: dict[tuple[torch.dtype, str], Plain] = {
    (dtype, op): (dtype.itemsize, *words) for (dtype, op), words in _PLAIN.items() if not dtype.is_complex
}


class PromptCalls:
    """A group's collectives, each returning when this rank's part is done.

    Tensors may be anything that the c10d calls take; contiguous ones on the CPU take the shortest path.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._rank, self._size = comm.Get_rank(), comm.Get_size()

    def barrier_now(self) -> None:
        _settle(self._comm.Ibarrier())

    def broadcast_now(self, tensor: Tensor, root: int) -> None:
        if not _is_plain(tensor) or _is_long(tensor):
            self._run(calls.broadcast(tensor, root, self._rank))
            return
        buffer = (_address(tensor.data_ptr(), tensor.nbytes), CARRIERS[tensor.itemsize])
        try:
            _settle(self._comm.Ibcast(buffer, root))
        except MPI.Exception as error:
            raise failure("broadcast", error) from error

    def all_reduce_now(self, tensor: Tensor, op: str = "sum", factor: Factor | None = None) -> None:
        arguments = plain_all_reduce(tensor, op)
        if arguments is None:
            self._run(calls.all_reduce(tensor, op, factor, self._size))
            return
        try:
            _settle(self._comm.Iallreduce(*arguments))
        except MPI.Exception as error:
            raise failure("all_reduce", error) from error

    def start_in_place(self, address: int, count: int, plain: Plain) -> list[MPI.Request]:
        """Begin all_reduce_now for a caller that knows where the numbers lie and that `PLAIN` has their kind."""
        itemsize, datatype, op = plain
        start = self._comm.Iallreduce
        steps = range(0, count, mpi_buffer.AT_ONCE)
        lengths = [min(mpi_buffer.AT_ONCE, count - first) for first in steps]
        return [
            start(MPI.IN_PLACE, (_address(address + first * itemsize, length * itemsize), datatype), op)
            for first, length in zip(steps, lengths, strict=True)
        ]

    def reduce_now(self, tensor: Tensor, root: int, op: str = "sum", factor: Factor | None = None) -> None:
        self._run(calls.reduce(tensor, root, op, factor, self._rank, self._size))

    def all_gather_now(self, output: Tensor, input: Tensor) -> None:
        """Equal sizes, into one tensor."""
        pair = _plain_pair(output, input)
        if pair is None or output.nbytes != input.nbytes * self._size:
            self._run(calls.all_gather_single(output, input, self._rank, self._size))
            return
        datatype = CARRIERS[input.itemsize]
        try:
            _settle(self._comm.Iallgather((pair[1], datatype), (pair[0], datatype)))
        except MPI.Exception as error:
            raise failure("all_gather", error) from error

    def all_gather_parts_now(self, outputs: Tensors, input: Tensor) -> None:
        """One output a rank; their sizes may differ."""
        self._run(calls.all_gather(outputs, input, self._rank, self._size))

    def run_now(self, call: Call) -> None:
        """Make any call of unisono.comm.mpi_calls, and wait for it."""
        self._run(call)

    def gather_now(self, outputs: Tensors, input: Tensor, root: int) -> None:
        self._run(calls.gather(outputs, input, root, self._rank, self._size))

    def scatter_now(self, output: Tensor, inputs: Tensors, root: int) -> None:
        self._run(calls.scatter(output, inputs, root, self._rank, self._size))

    def reduce_scatter_now(self, output: Tensor, input: Tensor, op: str = "sum", factor: Factor | None = None) -> None:
        """Equal sizes, from one tensor."""
        plain = _PLAIN.get((input.dtype, op))
        pair = _plain_pair(output, input)
        if plain is None or pair is None or input.nbytes != output.nbytes * self._size:
            self._run(calls.reduce_scatter_single(output, input, op, factor, self._rank, self._size))
            return
        datatype, mpi_op = plain
        try:
            _settle(self._comm.Ireduce_scatter_block((pair[1], datatype), (pair[0], datatype), mpi_op))
        except MPI.Exception as error:
            raise failure("reduce_scatter", error) from error

    def reduce_scatter_parts_now(
        self, output: Tensor, inputs: Tensors, op: str = "sum", factor: Factor | None = None
    ) -> None:
        """One input a rank; their sizes may differ."""
        self._run(calls.reduce_scatter(output, inputs, op, factor, self._rank, self._size))

    def all_to_all_now(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
    ) -> None:
        """Splits count rows, one a rank; none for equal parts. All ranks give splits, or none does."""
        if output_splits or input_splits:
            self._run(calls.all_to_all_single(output, input, output_splits, input_splits, self._size))
            return
        pair = _plain_pair(output, input)
        if pair is None or output.nbytes != input.nbytes or input.numel() % self._size:
            self._run(calls.all_to_all_even(output, input, self._size))
            return
        datatype = CARRIERS[input.itemsize]
        try:
            _settle(self._comm.Ialltoall((pair[1], datatype), (pair[0], datatype)))
        except MPI.Exception as error:
            raise failure("all_to_all", error) from error

    def all_to_all_parts_now(self, outputs: Tensors, inputs: Tensors) -> None:
        self._run(calls.all_to_all(outputs, inputs, self._size))

    def send_now(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self._run(calls.send(tensor, to, tag))

    def recv_now(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        """Receive from `source` (None: from anybody) and say who it was."""
        call = calls.receive(tensor, MPI.ANY_SOURCE if source is None else source, tag)
        self._run(call)
        return call.status.Get_source()

    def _run(self, call: Call) -> None:
        try:
            requests = [getattr(self._comm, STARTERS[method])(*arguments) for method, arguments in call.steps]
            for request in requests:
                _settle(request, call.status)
        except MPI.Exception as error:
            raise failure(call.name, error) from error
        self._finish(call)

    def run_together(self, made: Sequence[Call]) -> None:
        """Start all of several calls, then wait for all."""
        try:
            started = [
                (call, [getattr(self._comm, STARTERS[method])(*arguments) for method, arguments in call.steps])
                for call in made
            ]
            for call, requests in started:
                for request in requests:
                    _settle(request, call.status)
                self._finish(call)
        except MPI.Exception as error:
            raise failure("exchange", error) from error

    def _finish(self, call: Call) -> None:
        if call.finish is not None:
            with torch.no_grad():
                call.finish()
            wait_for_devices(call.outputs)


def soon_done(request: MPI.Request, status: MPI.Status | None = None) -> bool:
    """Whether the operation ends within a short while."""
    test = request.Test
    for _ in LOOKS:  # noqa: SIM110 - any() would be slower, and this is where a short operation spends its time
        if test(status):
            return True
    return False


def _settle(request: MPI.Request, status: MPI.Status | None = None) -> None:
    if not soon_done(request, status):
        request.Wait(status)


def plain_all_reduce(tensor: Tensor, op: str) -> tuple[MPI.InPlaceType, Buffer, MPI.Op] | None:
    """MPI's arguments to reduce a tensor in its own memory, or None where it takes more than that."""
    plain = _PLAIN.get((tensor.dtype, op))
    if plain is None or not _is_plain(tensor) or _is_long(tensor):
        return None
    return MPI.IN_PLACE, (_address(tensor.data_ptr(), tensor.nbytes), plain[0]), plain[1]


def _plain_pair(output: Tensor, input: Tensor) -> tuple[MPI.memory, MPI.memory] | None:
    """The memory of both, or None where MPI cannot use it as it lies."""
    if not (_is_plain(output) and _is_plain(input)) or output.dtype != input.dtype:
        return None
    if _is_long(output) or _is_long(input):
        return None
    into, output_bytes, of, input_bytes = output.data_ptr(), output.nbytes, input.data_ptr(), input.nbytes
    if into < of + input_bytes and of < into + output_bytes:
        return None
    return _address(into, output_bytes), _address(of, input_bytes)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and is_direct(tensor)


def _is_long(tensor: Tensor) -> bool:
    """Whether it may take more than one call. A complex number may travel as two."""
    return 2 * tensor.numel() > mpi_buffer.AT_ONCE
