"""The fast path of a Communicator over MPI: blocking calls on plain CPU tensors, with as little Python as possible.

all_reduce, broadcast, send, recv and exchange of small messages are felt in microseconds by pipelines, optimizers and
circuit simulations. Each method starts the same non-blocking MPI call as the transport does (MPI does not match
blocking with non-blocking ones), writes the log while the message travels, and waits. It returns False, having done
nothing, where it does not apply: then the Communicator validates and takes the transport. Imports mpi4py: import it
late.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from mpi4py import MPI

from unisono.comm import traffic
from unisono.comm.mpi.buffers import NUMBERS, OPS, Buffer, is_plain
from unisono.comm.mpi.calls import not_as_long
from unisono.comm.mpi.work import LOOKS, failure, settle
from unisono.comm.operation import Message
from unisono.comm.p2p import TAGS
from unisono.comm.reduction import COMPLEXES, DTYPES, HALF_DTYPES, MEANINGFUL, plan_reduction
from unisono.comm.watchdog.op_log import OpLog, op_detail, root_detail
from unisono.comm.watchdog.watchdog import Watchdog

if TYPE_CHECKING:
    from unisono.comm.mpi.process_group import MPIProcessGroup

_address = MPI.memory.fromaddress
_IN_PLACE = MPI.IN_PLACE
_SHORT = 2**31 - 1  # bytes that every MPI takes in one call


def _reductions() -> dict[tuple[torch.dtype, str], tuple[MPI.Datatype, MPI.Op]]:
    """The (dtype, op) that MPI reduces in a tensor's own memory. Complex tensors may be conjugate views."""
    found = {}
    for dtype in DTYPES - HALF_DTYPES - COMPLEXES:
        for op in MEANINGFUL:
            if dtype in MEANINGFUL[op] and op not in ("avg", "premul_sum"):
                reduction = plan_reduction(op, dtype)
                found[dtype, op] = NUMBERS[reduction.wire_dtype], OPS[reduction.wire_op]
    return found


_REDUCTIONS = _reductions()


class FastPath:
    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog, log: OpLog, p2p_log: OpLog) -> None:
        self._comm = cast("MPIProcessGroup", group).comm
        self._rank, self._size = self._comm.rank, self._comm.size
        self._start_all_reduce = self._comm.Iallreduce
        self._watchdog = watchdog
        self._log = log
        self._p2p_log = p2p_log
        self._status = MPI.Status()

    def all_reduce(self, tensor: torch.Tensor, op: str) -> bool:
        if not isinstance(tensor, torch.Tensor) or op.__class__ is not str or not is_plain(tensor) or traffic.counters:
            return False
        words = _REDUCTIONS.get((tensor.dtype, op))
        nbytes = tensor.nbytes
        if words is None or nbytes > _SHORT:
            return False
        request = self._start_all_reduce(_IN_PLACE, (_address(tensor.data_ptr(), nbytes), words[0]), words[1])
        self._settle("all_reduce", op_detail(op), tensor, request)
        return True

    def broadcast(self, tensor: torch.Tensor, root: int) -> bool:
        buffer = _buffer(tensor)
        if buffer is None:
            return False
        self._settle("broadcast", root_detail(root), tensor, self._comm.Ibcast(buffer, root))
        return True

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int = 0, what: str = "") -> bool:
        """what: the operation, where it is one message and not an exchange."""
        into, of = self._buffers(recvs), self._buffers(sends)
        if into is None or of is None or tag.__class__ is not int or not 0 <= tag < TAGS:
            return False
        comm, log, status = self._comm, self._p2p_log, self._status
        requests = [comm.Irecv(buffer, source, tag) for buffer, source in into]
        requests += [comm.Isend(buffer, to, tag) for buffer, to in of]
        peers = ",".join([str(peer) for _, peer in (*into, *of)])
        shown = (*recvs, *sends)[0][0] if what else None
        log.enter(f"{what or 'exchange with ranks'} {peers}", "", shown, sys._getframe(2))
        try:
            for (tensor, _), (buffer, _), request in zip(recvs, into, requests, strict=False):
                settle(request, status)
                if status.Get_count(MPI.BYTE) != buffer[0].nbytes:
                    raise not_as_long(tensor, status)
            for request in requests[len(into) :]:
                settle(request)
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise failure("recv", error) from error
            raise self._watchdog.explained(error) from error
        finally:
            log.left = log.entered
        return True

    def _settle(self, op: str, detail: str, tensor: torch.Tensor, request: MPI.Request) -> None:
        """Log a call that was just started (starting does not block) and wait for it."""
        log, frame = self._log, sys._getframe(3)
        log.entered += 1
        log.append((log.entered, op, detail, tensor.shape, tensor.dtype, frame.f_code, frame.f_lasti))
        try:
            test = request.Test
            for _ in LOOKS:  # `settle` written out: a call more is felt here
                if test():
                    break
            else:
                request.Wait()
        except RuntimeError as error:
            raise self._watchdog.explained(error) from error
        finally:
            log.left = log.entered

    def _buffers(self, messages: Sequence[Message]) -> list[tuple[Buffer, int]] | None:
        """The messages as MPI takes them, or None where it cannot take all as they are."""
        found = []
        for tensor, peer in messages:
            buffer = _buffer(tensor)
            if buffer is None or peer.__class__ is not int or peer == self._rank or not 0 <= peer < self._size:
                return None
            found.append((buffer, peer))
        return found


def _buffer(tensor: torch.Tensor) -> Buffer | None:
    """A tensor's own memory as bytes, or None where MPI cannot use it as it is."""
    if not isinstance(tensor, torch.Tensor) or not is_plain(tensor) or traffic.counters:
        return None
    nbytes = tensor.nbytes
    return (_address(tensor.data_ptr(), nbytes), MPI.BYTE) if nbytes <= _SHORT else None
