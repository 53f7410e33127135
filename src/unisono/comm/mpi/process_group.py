"""The torch process group over an MPI communicator. Imports mpi4py, so import it late (see mpi/library.py).

Every c10d call starts non-blocking MPI requests and returns a Work; waiting polls, so that a timeout is kept
and signals are handled. A Communicator's transport calls `start` and `run` directly, without c10d's dispatch.
"""

# torch's stubs give each method several overloads; c10d itself calls only the one that is here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)
from torch.distributed.distributed_c10d import AllgatherOptions  # torch.distributed does not export this one

from unisono.comm.mpi import calls
from unisono.comm.mpi.calls import MPICall
from unisono.comm.mpi.work import SPINS, MPIOperation, MPIWork, failure, settle, wait_for_devices
from unisono.comm.reduction import OPS, Factor
from unisono.errors import UsageError

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


class MPIProcessGroup(ProcessGroup):
    """`comm` becomes the group's own: it is freed at shutdown."""

    def __init__(self, store: Store, comm: MPI.Intracomm, timeout: timedelta) -> None:
        self._comm = comm
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        super().__init__(self._rank, self._size)  # type: ignore[call-arg]
        self._store = store
        self._group_name = self._group_description = ""
        self._timeout = timeout
        self._coalescing: list[MPIWork] | None = None

    @property
    def comm(self) -> MPI.Intracomm:
        """The MPI communicator, for a user's own mpi4py calls between those of the group."""
        return self._comm

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    # C++ asks by the first of each pair of names, Python by the second.

    def getBackendName(self) -> str:
        return "mpi4py"

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupDesc(self, description: str) -> None:
        self._group_description = description

    def getGroupDesc(self) -> str:
        return self._group_description

    name = getBackendName
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def shutdown(self) -> None:
        if self._comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self._comm.Free()

    def abort(self) -> None:
        if not MPI.Is_finalized():
            self._comm.Abort(1)

    # Making calls.

    def run(self, made: Sequence[MPICall]) -> None:
        """Start all calls, then wait for all."""
        name = made[0].name if made else ""
        try:
            started = [(call, self._requests(call)) for call in made]
            for call, requests in started:
                name = call.name
                for request in requests:
                    settle(request, call.status)
                _finish(call)
        except MPI.Exception as error:
            raise failure(name, error) from error

    def start(self, call: MPICall, opts: Any = None) -> MPIWork:
        """Begin a call; the work completes also when nobody waits for it."""
        try:
            requests = self._requests(call)
        except MPI.Exception as error:
            raise failure(call.name, error) from error
        if opts is not None and not opts.asyncOp and self._coalescing is None and self._spin(call, requests):
            return _FINISHED
        operation = MPIOperation(call.name, requests, call.outputs, call.memory, call.finish, call.status, self._comm)
        own_timeout = opts is not None and opts.timeout > timedelta(0)
        work = MPIWork(operation, opts.timeout if own_timeout else self._timeout)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _requests(self, call: MPICall) -> list[MPI.Request]:
        return [getattr(self._comm, method)(*arguments) for method, arguments in call.steps]

    def _spin(self, call: MPICall, requests: list[MPI.Request]) -> bool:
        """Whether a call that nobody will look back at completes within a short while; it needs no Work."""
        [*others, last] = requests or [MPI.REQUEST_NULL]
        try:
            if others or not any(last.Test(call.status) for _ in range(SPINS)):
                return False
        except MPI.Exception as error:
            raise failure(call.name, error) from error
        _finish(call)
        return True

    # c10d's calls, under the names of torch 2.11 and of 2.13.

    def allreduce(self, tensors: Tensors, opts: AllreduceOptions | None = None) -> MPIWork:
        op, factor = _op_and_factor(opts)
        return self.start(calls.all_reduce(_only(tensors), op, factor, self._size), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions | None = None) -> MPIWork:
        op, factor = _op_and_factor(opts)
        each = [calls.all_reduce(tensor, op, factor, self._size) for tensor in tensors]
        return self.start(calls.together("all_reduce", each), opts)

    def broadcast(self, tensors: Tensors, opts: BroadcastOptions | None = None) -> MPIWork:
        return self.start(calls.broadcast(_only(tensors), _root(opts), self._rank), opts)

    def reduce(self, tensors: Tensors, opts: ReduceOptions | None = None) -> MPIWork:
        op, factor = _op_and_factor(opts)
        call = calls.reduce(_only(tensors), _root(opts), op, factor, self._rank, self._size)
        return self.start(call, opts)

    def allgather(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> MPIWork:
        call = calls.all_gather(_only(output_lists), _only(inputs), self._rank, self._size)
        return self.start(call, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> MPIWork:
        each = [
            calls.all_gather([outputs[index] for outputs in output_lists], input, self._rank, self._size)
            for index, input in enumerate(inputs)
        ]
        return self.start(calls.together("all_gather", each), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None) -> MPIWork:
        return self.start(calls.all_gather_single(output, input, self._rank, self._size), opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions | None = None
    ) -> MPIWork:
        pairs = zip(outputs, inputs, strict=True)
        each = [calls.all_gather_single(output, input, self._rank, self._size) for output, input in pairs]
        return self.start(calls.together("all_gather", each), opts)

    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: GatherOptions | None = None) -> MPIWork:
        outputs = _only(output_lists) if self._rank == _root(opts) else ()
        call = calls.gather(outputs, _only(inputs), _root(opts), self._rank, self._size)
        return self.start(call, opts)

    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: ScatterOptions | None = None) -> MPIWork:
        inputs = _only(input_lists) if self._rank == _root(opts) else ()
        call = calls.scatter(_only(outputs), inputs, _root(opts), self._rank, self._size)
        return self.start(call, opts)

    def reduce_scatter(
        self,
        outputs: Tensors,
        input_lists: Sequence[Tensors],
        opts: ReduceScatterOptions | None = None,
    ) -> MPIWork:
        op, factor = _op_and_factor(opts)
        call = calls.reduce_scatter(_only(outputs), _only(input_lists), op, factor, self._rank, self._size)
        return self.start(call, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: ReduceScatterOptions | None = None) -> MPIWork:
        op, factor = _op_and_factor(opts)
        call = calls.reduce_scatter_single(output, input, op, factor, self._rank, self._size)
        return self.start(call, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: ReduceScatterOptions | None = None
    ) -> MPIWork:
        op, factor = _op_and_factor(opts)
        each = [
            calls.reduce_scatter_single(output, input, op, factor, self._rank, self._size)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self.start(calls.together("reduce_scatter", each), opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: AllToAllOptions | None = None,
    ) -> MPIWork:
        call = calls.all_to_all_single(output, input, output_splits, input_splits, self._size)
        return self.start(call, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: AllToAllOptions | None = None) -> MPIWork:
        return self.start(calls.all_to_all(outputs, inputs, self._size), opts)

    def barrier(self, opts: BarrierOptions | None = None) -> MPIWork:
        return self.start(calls.barrier(), opts)

    def send(self, tensors: Tensors, dst: int, tag: int) -> MPIWork:
        return self.start(calls.send(_only(tensors), dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int) -> MPIWork:
        return self.start(calls.receive(_only(tensors), src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> MPIWork:
        return self.start(calls.receive(_only(tensors), MPI.ANY_SOURCE, tag))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> MPIWork:
        works, self._coalescing = self._coalescing or [], None
        return MPIWork.of_all(works, self._timeout)


_FINISHED = MPIWork(MPIOperation("a finished call", [], (), None, None, MPI.Status()), timedelta(0))
_OP_NAMES = {getattr(ReduceOp.RedOpType, op.upper()): op for op in OPS}


def _finish(call: MPICall) -> None:
    if call.finish is not None:
        with torch.no_grad():
            call.finish()
        wait_for_devices(call.outputs)


def _op_and_factor(opts: Any) -> tuple[str, Factor | None]:
    if opts is None:
        return "sum", None
    reduce_op = opts.reduceOp
    op = _OP_NAMES[reduce_op.op]
    return op, reduce_op.__getstate__()[1] if op == "premul_sum" else None


def _root(opts: Any) -> int:
    return 0 if opts is None else opts.rootRank


def _only(items: Any) -> Any:
    """c10d passes lists for several devices a process; there is one."""
    if isinstance(items, torch.Tensor):
        return items
    if len(items) != 1:
        raise UsageError(f"MPI takes one tensor (or list of tensors) a call and rank, but was given {len(items)}")
    return items[0]
