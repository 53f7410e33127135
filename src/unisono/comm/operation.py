"""One operation from the caller's tensors to the wire and back: what all of a Communicator's methods share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from unisono.comm import traffic
from unisono.comm.backends import GLOO, MPI, NCCL, Carriage, Carrier, carry, movable
from unisono.comm.handle import Handle
from unisono.comm.log import Log
from unisono.comm.reduction import Factor, require_op
from unisono.comm.watch import Watch
from unisono.errors import CommError, UnisonoError, UsageError

# A tensor, a list of tensors or None, as the method says; with async_op=True a Handle on it.
Outcome = Any
Start = Callable[[], Sequence[dist.Work]]
Finish = Callable[[], Any]


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor's data in pinned host memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def whole_numbers(what: str, given: Sequence[int]) -> list[int]:
    """UsageError where they are anything else."""
    if not isinstance(given, Iterable) or not all(isinstance(each, SupportsIndex) for each in given):
        raise UsageError(f"{what} {given!r}: expected a list of whole numbers")
    return [each.__index__() for each in given]


class Operations:
    """Runs operations on torch's process group `group`, in the log and under the eye of the watch."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    backend: str
    is_simulated: bool
    group: dist.ProcessGroup
    _log: Log
    _watch: Watch

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
        """`start` begins the operation (one that `blocks` also ends it), and `finish` gives its outcome.

        `is_mute`: of gloo's messages between two ranks, see Handle.
        """
        log, watch = self._log, self._watch
        if traffic.counters:
            traffic.note(op, self.size, tensor, self.ranks)
        try:
            if self.backend == "gloo" and watch.check is None and not blocks:
                if watch.box is not None:
                    frame = sys._getframe(depth - 1)
                    watch.box.write(log, op, detail, tensor, frame.f_code, frame.f_lineno)
                works = self._started(op, start)
                log.enter(op, detail, tensor, depth)  # while the message travels, which hides what it costs
            else:
                log.enter(op, detail, tensor, depth)
                if watch.check is not None:
                    watch.check.agree(log)
                works = self._started(op, start)
            if async_op:
                return Handle(works, finish, watch.waiter(log), is_mute=is_mute)
            for work in works:
                work.wait()
        except UnisonoError:
            raise
        except RuntimeError as error:
            raise watch.explained(error) from error
        finally:
            log.left = log.entered
        return finish()

    def _started(self, op: str, start: Start) -> Sequence[dist.Work]:
        """Begin an operation. An error here is this rank's own: the backend refused before it talked to anyone."""
        try:
            return start()
        except RuntimeError as error:
            raise CommError(f"{op} was refused by {self.backend}: {str(error).splitlines()[0]}") from error

    def _carrier(self, tensor: torch.Tensor) -> Carrier:
        if self.backend == "mpi":
            return MPI
        return NCCL if tensor.is_cuda and self.backend == "nccl" else GLOO

    def _prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's data contiguous, where the carrier reads it; its own memory where that is possible."""
        self._require_numbers(tensor)
        data = tensor.detach().resolve_conj().resolve_neg()
        if data.is_cuda and not self._carrier(tensor).takes_cuda:
            data = host_copy(data)
        return data.contiguous()

    def _moving(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        """What travels for `tensor` in an operation that moves data, and how to bring it back."""
        data = self._prepared(tensor)

        def finish() -> torch.Tensor:
            if data.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(data)
            return tensor

        return movable(self._carrier(tensor), data), finish

    def _require_numbers(self, tensor: torch.Tensor) -> None:
        """Of what is to be carried. UsageError where it is no tensor, not dense, or without data."""
        if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided:
            return  # nearly always, and MPI's operations feel each microsecond
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"expected a tensor, but was given {tensor!r}; torch.as_tensor makes one")
        if tensor.layout is not torch.strided:
            raise UsageError(f"a tensor of layout {tensor.layout} cannot be carried; pass a dense one (x.to_dense())")
        if tensor.device.type not in ("cpu", "cuda") and not (tensor.is_meta and self.is_simulated):
            raise UsageError(f"a tensor on {tensor.device} cannot be carried; pass one on cpu or cuda")

    def _carriage(self, tensor: torch.Tensor, op: str) -> Carriage:
        self._require_numbers(tensor)
        require_op(op)
        return carry(self._carrier(tensor), op, tensor.dtype)

    def _reducing(self, carriage: Carriage, tensor: torch.Tensor, factor: Factor | None) -> torch.Tensor:
        """What travels for `tensor` in a reduction."""
        if carriage.is_plain and factor is None and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
            return tensor.detach() if tensor.requires_grad else tensor
        return carriage.to_wire(self._prepared(tensor), factor)

    def _shapes(self, tensor: torch.Tensor) -> list[tuple[int, ...]]:
        """The shapes of all ranks' tensors; a call of its own."""
        shapes: list[Any] = [None] * self.size
        dist.all_gather_object(shapes, tuple(tensor.shape), group=self.group)
        if any(len(shape) != tensor.dim() for shape in shapes):
            raise UsageError(f"the ranks' tensors have different numbers of dimensions: {shapes}")
        return shapes

    def _parts(self, op: str, tensor: torch.Tensor, sizes: Sequence[int] | None) -> list[int]:
        """How dim 0 is cut into one part a rank."""
        self._require_numbers(tensor)
        if tensor.dim() == 0:
            raise UsageError(f"{op}: the tensor has no dimensions; expected dim 0 to be cut into {self.size} parts")
        length = tensor.shape[0]
        if sizes is None:
            if length % self.size:
                raise UsageError(f"{op}: {self.size} ranks do not divide dim 0 of length {length}; pass the sizes")
            return [length // self.size] * self.size
        whole = whole_numbers(f"{op}: sizes", sizes)
        if len(whole) != self.size or sum(whole) != length or min(whole) < 0:
            raise UsageError(f"{op}: sizes {whole} do not cut length {length} into {self.size} parts")
        return whole

    def _room(self, op: str, out: torch.Tensor | None, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """The place for an outcome of `rows` rows of `tensor`."""
        shape = (rows, *tensor.shape[1:])
        if out is None:
            return tensor.new_empty(shape)
        self._require_numbers(out)
        if tuple(out.shape) != shape or out.dtype != tensor.dtype:
            raise UsageError(f"{op}: out is {out.dtype} {tuple(out.shape)}; expected {tensor.dtype} {shape}")
        return out

    def _require_rank(self, what: str, rank: int) -> None:
        if rank.__class__ is int and 0 <= rank < self.size:
            return  # the protocol below is asked for microseconds
        if not isinstance(rank, SupportsIndex) or not 0 <= rank.__index__() < self.size:
            raise UsageError(f"{what} {rank!r} is not in this group of {self.size}: expected 0 to {self.size - 1}")
