"""The transport over MPI: each operation as MPI calls (mpi/calls.py) on the group's communicator, without c10d.

Whether a rank waits at once or later, it makes the same MPI calls, so ranks may differ in that. Imports mpi4py: import
it late.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from mpi4py import MPI

from unisono.comm.mpi import calls
from unisono.comm.mpi.calls import MPICall
from unisono.comm.mpi.process_group import MPIProcessGroup
from unisono.comm.operation import Message, Transfer
from unisono.comm.reduction import Factor

Tensor = torch.Tensor


class MPITransport:
    is_simulated = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = cast(MPIProcessGroup, group)
        self._rank, self._size = self._group.comm.rank, self._group.comm.size

    def _transfer(self, *made: MPICall) -> Transfer:
        return Transfer(lambda: [self._group.start(call) for call in made], run=partial(self._group.run, made))

    def broadcast(self, tensor: Tensor, root: int) -> Transfer:
        return self._transfer(calls.broadcast(tensor, root, self._rank))

    def all_reduce(self, tensor: Tensor, op: str, factor: Factor | None) -> Transfer:
        return self._transfer(calls.all_reduce(tensor, op, factor, self._size))

    def reduce(self, tensor: Tensor, root: int, op: str, factor: Factor | None) -> Transfer:
        return self._transfer(calls.reduce(tensor, root, op, factor, self._rank, self._size))

    def all_gather(self, outs: Sequence[Tensor], tensor: Tensor) -> Transfer:
        return self._transfer(calls.all_gather(outs, tensor, self._rank, self._size))

    def all_gather_into(self, out: Tensor, tensor: Tensor) -> Transfer:
        return self._transfer(calls.all_gather_single(out, tensor, self._rank, self._size))

    def gather(self, outs: Sequence[Tensor], tensor: Tensor, root: int) -> Transfer:
        return self._transfer(calls.gather(outs, tensor, root, self._rank, self._size))

    def gather_into(self, out: Tensor | None, tensor: Tensor, root: int) -> Transfer:
        return self._transfer(calls.gather_into(out, tensor, root))

    def scatter(self, out: Tensor, chunks: Sequence[Tensor] | Tensor | None, root: int) -> Transfer:
        return self._transfer(calls.scatter_from(out, chunks, root))

    def reduce_scatter(
        self, out: Tensor, tensor: Tensor, sizes: Sequence[int], op: str, factor: Factor | None
    ) -> Transfer:
        if len(set(sizes)) == 1:
            return self._transfer(calls.reduce_scatter_single(out, tensor, op, factor, self._rank, self._size))
        parts = tensor.split(list(sizes))
        return self._transfer(calls.reduce_scatter(out, parts, op, factor, self._rank, self._size))

    def all_to_all(
        self, out: Tensor, tensor: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int], even: bool
    ) -> Transfer:
        if even:
            return self._transfer(calls.all_to_all_even(out, tensor, self._size))
        return self._transfer(calls.all_to_all_single(out, tensor, recv_sizes, send_sizes, self._size))

    def barrier(self) -> Transfer:
        return self._transfer(calls.barrier())

    def send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        return self._transfer(calls.send(tensor, to, tag))

    def recv(self, tensor: Tensor, source: int | None, tag: int) -> Transfer:
        call = calls.receive(tensor, MPI.ANY_SOURCE if source is None else source, tag)
        transfer = self._transfer(call)
        transfer.finish = call.status.Get_source
        return transfer

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Transfer:
        made = [calls.receive(tensor, source, 0) for tensor, source in recvs]
        return self._transfer(*made, *(calls.send(tensor, to, 0) for tensor, to in sends))
