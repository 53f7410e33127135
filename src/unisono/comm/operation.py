"""One operation: validated by a Communicator's method, logged, started on a transport, finished.

A `Transport` makes a `Transfer` of an operation on tensors: how to start it on a library, and how to bring what
arrives into the caller's tensors. There are three: c10d (gloo and NCCL, comm/c10d.py), MPI (comm/mpi/transport.py) and
a simulated one (comm/rendezvous/simulated.py). A transfer is built before anything is logged or sent, so an argument
that the transport refuses is an error on this rank alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

import torch
import torch.distributed as dist

from unisono.comm import traffic
from unisono.comm.handle import Awaited, Handle
from unisono.comm.reduction import Factor, op_named, plan_reduction
from unisono.comm.signatures.seal import Seal
from unisono.comm.watchdog.op_log import OpLog
from unisono.comm.watchdog.watchdog import Watchdog
from unisono.errors import CommError, UsageError

# A tensor, a list of tensors or None, as the method documents; with async_op=True a Handle on it.
Outcome = Any
Tensor = torch.Tensor
_MOST_DIMS = 64  # that torch gives a tensor
Message = tuple[torch.Tensor, int]  # a tensor, and the rank it goes to or comes from


_refused_because: list[str] = []  # of `no_communication`


@contextlib.contextmanager
def no_communication(why: str) -> Iterator[None]:
    """In the block, which one rank runs while the others wait, an operation on real ranks is a UsageError: nobody would
    answer it, and the next one of the others would be taken for the answer."""
    _refused_because.append(why)
    try:
        yield
    finally:
        _refused_because.pop()


@dataclass
class Transfer:
    """One operation, ready to start."""

    start: Callable[[], Sequence[Awaited]]  # begin; all of what it returns must be waited for
    finish: Callable[[], Any] = lambda: None  # once, after the waiting
    run: Callable[[], None] | None = None  # start and wait in one, where the library is quicker at that
    is_mute: bool = False  # the works do not report that they are over: see Handle


class Transport(Protocol):
    """Moves tensors between the ranks of one group. Arguments have been validated; roots and peers are group ranks.

    Tensors of `outs`, and `out`, receive; all else is only read, but for the tensors of broadcast, all_reduce and (on
    the root) reduce, which are changed in place.
    """

    is_simulated: bool

    def broadcast(self, tensor: Tensor, root: int) -> Transfer: ...
    def all_reduce(self, tensor: Tensor, op: str, factor: Factor | None) -> Transfer: ...
    def reduce(self, tensor: Tensor, root: int, op: str, factor: Factor | None) -> Transfer: ...
    def all_gather(self, outs: Sequence[Tensor], tensor: Tensor) -> Transfer: ...
    def all_gather_into(self, out: Tensor, tensor: Tensor) -> Transfer: ...

    def gather(self, outs: Sequence[Tensor], tensor: Tensor, root: int) -> Transfer:
        """Shapes may differ. `outs` are empty but on the root."""

    def gather_into(self, out: Tensor | None, tensor: Tensor, root: int) -> Transfer:
        """`out`, on the root, is contiguous and has one row per rank."""

    def scatter(self, out: Tensor, chunks: Sequence[Tensor] | Tensor | None, root: int) -> Transfer:
        """`chunks`, on the root, are a list or one tensor of rows."""

    def reduce_scatter(
        self, out: Tensor, tensor: Tensor, sizes: Sequence[int], op: str, factor: Factor | None
    ) -> Transfer: ...

    def all_to_all(
        self, out: Tensor, tensor: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int], even: bool
    ) -> Transfer: ...

    def barrier(self) -> Transfer: ...
    def send(self, tensor: Tensor, to: int, tag: int) -> Transfer: ...

    def recv(self, tensor: Tensor, source: int | None, tag: int) -> Transfer:
        """source None: from any rank; then only run(), not start(). `finish` returns the source."""

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Transfer: ...


def whole_numbers(what: str, given: Sequence[int]) -> list[int]:
    """UsageError where they are anything else."""
    if not isinstance(given, Iterable) or not all(isinstance(each, SupportsIndex) for each in given):
        raise UsageError(f"{what} {given!r}: expected a list of whole numbers")
    return [each.__index__() for each in given]


class CommunicatorBase:
    """What all methods of a Communicator share: running a transfer, and validating arguments."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    backend: str
    is_simulated: bool
    seal: Seal
    group: dist.ProcessGroup
    _log: OpLog
    _p2p_log: OpLog
    _watchdog: Watchdog
    _transport: Transport

    def _run(
        self,
        op: str,
        tensor: Tensor | None,
        transfer: Transfer,
        result: Any,
        async_op: bool,
        detail: str = "",
        log: OpLog | None = None,
    ) -> Outcome:
        """Log an operation, start it, and wait for it or return its handle.

        The outcome is `result`, or where that is None what the transfer's finish returns. log: where not `_log`.
        """
        if _refused_because and not self.is_simulated:
            raise UsageError(f"{op} among {self.size} ranks, {_refused_because[-1]}")
        watchdog = self._watchdog
        if log is None:
            log = self._log
            if traffic.counters:
                traffic.note(op, self.size, tensor, self.ranks)
        watchdog.begin(log, op, detail, tensor)
        try:
            if async_op or transfer.run is None:
                try:
                    works = transfer.start()
                except RuntimeError as error:  # the backend refused before it talked to anyone
                    raise CommError(f"{op} was refused by {self.backend}: {str(error).splitlines()[0]}") from error
                if async_op:
                    finish = transfer.finish if result is None else _then(transfer.finish, result)
                    return Handle(works, finish, watchdog.waiter(log), is_mute=transfer.is_mute)
                watchdog.guarded(lambda: _wait_for(works))
            else:
                watchdog.guarded(transfer.run)
        finally:
            log.left = log.entered
        value = transfer.finish()
        return value if result is None else result

    # ---- validation ----------------------------------------------------------------------------------------------

    def _require_tensor(self, tensor: Tensor) -> None:
        """UsageError where it is no tensor, not dense, or without data."""
        if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.layout is torch.strided:
            return
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"expected a tensor, but was given {tensor!r}; torch.as_tensor makes one")
        if tensor.layout is not torch.strided:
            raise UsageError(f"a tensor of layout {tensor.layout} cannot be sent; pass a dense one (x.to_dense())")
        if tensor.device.type not in ("cpu", "cuda") and not (tensor.is_meta and self.is_simulated):
            raise UsageError(f"a tensor on {tensor.device} cannot be sent; pass one on cpu or cuda")

    def _checked_reduction(self, tensor: Tensor, op: str, factor: Factor | None) -> str:
        """The op by its own name."""
        self._require_tensor(tensor)
        op = op_named(op)
        plan_reduction(op, tensor.dtype).require_factor(tensor, factor)
        return op

    def _require_rank(self, what: str, rank: int) -> None:
        if rank.__class__ is int and 0 <= rank < self.size:
            return
        if not isinstance(rank, SupportsIndex) or not 0 <= rank.__index__() < self.size:
            raise UsageError(f"{what} {rank!r} is not in this group of {self.size}: expected 0 to {self.size - 1}")

    def _shapes(self, tensor: Tensor) -> list[tuple[int, ...]]:
        """The shapes of all ranks' tensors; a collective of its own."""
        row = torch.zeros(1 + _MOST_DIMS, dtype=torch.int64)
        row[: 1 + tensor.dim()] = torch.tensor([tensor.dim(), *tensor.shape])
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, group=self.group)
        shapes = [tuple(each[1 : 1 + each[0]]) for each in (gathered.tolist() for gathered in rows)]
        if any(len(shape) != tensor.dim() for shape in shapes):
            raise UsageError(f"the ranks' tensors have different numbers of dimensions: {shapes}")
        return shapes

    def _split_sizes(self, op: str, tensor: Tensor, sizes: Sequence[int] | None) -> list[int]:
        """How dim 0 is split into one part per rank."""
        self._require_tensor(tensor)
        if tensor.dim() == 0:
            raise UsageError(f"{op}: the tensor has no dimensions; expected dim 0 to be split into {self.size} parts")
        length = tensor.shape[0]
        if sizes is None:
            if length % self.size:
                raise UsageError(f"{op}: {self.size} ranks do not divide dim 0 of length {length}; pass the sizes")
            return [length // self.size] * self.size
        checked = whole_numbers(f"{op}: sizes", sizes)
        if len(checked) != self.size or sum(checked) != length or min(checked) < 0:
            raise UsageError(f"{op}: sizes {checked} do not split length {length} into {self.size} parts")
        return checked

    def _output(self, op: str, out: Tensor | None, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor for an outcome of this shape: `out` where it is given and fits."""
        if out is None:
            return tensor.new_empty(shape)
        self._require_tensor(out)
        if tuple(out.shape) != shape or out.dtype != tensor.dtype:
            raise UsageError(f"{op}: out is {out.dtype} {tuple(out.shape)}; expected {tensor.dtype} {shape}")
        return out


def _then(finish: Callable[[], Any], result: Any) -> Callable[[], Any]:
    def finished() -> Any:
        finish()
        return result

    return finished


def _wait_for(works: Sequence[Awaited]) -> None:
    for work in works:
        work.wait()
