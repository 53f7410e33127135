"""The collectives of a Communicator on tensors: each validates its arguments and runs them on the transport.

The outcome does not depend on the backend. On MPI, blocking all_reduce and broadcast of plain CPU tensors take the fast
path (comm/mpi/fast_path.py) first, which returns False where it does not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from unisono.comm.operation import CommunicatorBase, Outcome, whole_numbers
from unisono.comm.reduction import Factor
from unisono.comm.watchdog.op_log import UNEVEN, op_detail, root_detail
from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.comm.mpi.fast_path import FastPath  # imports mpi4py


class Collectives(CommunicatorBase):
    """Operations in which every rank of the group takes part. Roots are ranks of the group."""

    _fast_path: FastPath | None

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False) -> Outcome:
        """Every rank's tensor becomes the root's."""
        self._require_rank("root", root)
        if self._fast_path is not None and not async_op and self._fast_path.broadcast(tensor, root):
            return tensor
        self._require_tensor(tensor)
        transfer = self._transport.broadcast(tensor, root)
        return self._run("broadcast", tensor, transfer, tensor, async_op, root_detail(root))

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, factor: Factor | None = None, async_op: bool = False
    ) -> Outcome:
        """Every rank's tensor becomes the reduction of all. `factor` is for op="premul_sum"."""
        if self._fast_path is not None and not async_op and factor is None and self._fast_path.all_reduce(tensor, op):
            return tensor
        op = self._checked_reduction(tensor, op, factor)
        transfer = self._transport.all_reduce(tensor, op, factor)
        return self._run("all_reduce", tensor, transfer, tensor, async_op, op_detail(op))

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
        op = self._checked_reduction(tensor, op, factor)
        transfer = self._transport.reduce(tensor, root, op, factor)
        return self._run("reduce", tensor, transfer, tensor, async_op, op_detail(op) + root_detail(root))

    def all_gather(self, tensor: torch.Tensor, *, uneven: bool = False, async_op: bool = False) -> Outcome:
        """A list of every rank's tensor. With `uneven` the shapes may differ; else they must be equal."""
        self._require_tensor(tensor)
        if uneven:
            outs = [tensor.new_empty(shape) for shape in self._shapes(tensor)]
            transfer = self._transport.all_gather(outs, tensor)
            return self._run("all_gather", tensor, transfer, outs, async_op, UNEVEN)
        joined = tensor.new_empty((self.size, *tensor.shape))
        transfer = self._transport.all_gather_into(joined, tensor)
        return self._run("all_gather", tensor, transfer, list(joined.unbind()), async_op)

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Outcome:
        """`out` becomes all ranks' tensors one after the other along dim 0; the quick form for equal shapes."""
        for each in (out, tensor):
            self._require_tensor(each)
        if out.numel() != tensor.numel() * self.size or out.dtype != tensor.dtype:
            raise UsageError(
                f"all_gather_into: out is {out.dtype} of {out.numel()} elements; expected {tensor.dtype} of "
                f"{self.size} x {tensor.numel()}"
            )
        transfer = self._transport.all_gather_into(out, tensor)
        return self._run("all_gather_into", tensor, transfer, out, async_op)

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

        `out`, which the root may pass where they do not, receives all, (size, *shape), and is then the outcome.
        """
        self._require_rank("root", root)
        self._require_tensor(tensor)
        is_root = self.rank == root
        if uneven:
            shapes = self._shapes(tensor)
            outs = [tensor.new_empty(shape) for shape in shapes] if is_root else []
            transfer = self._transport.gather(outs, tensor, root)
            return self._run("gather", tensor, transfer, outs or None, async_op, UNEVEN + root_detail(root))
        joined = self._output("gather", out, tensor, (self.size, *tensor.shape)) if is_root else None
        if joined is not None and not joined.is_contiguous():
            raise UsageError("gather: out is not contiguous; pass one that is")
        transfer = self._transport.gather_into(joined, tensor, root)
        result = list(joined.unbind()) if joined is not None and out is None else joined
        return self._run("gather", tensor, transfer, result, async_op, root_detail(root))

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
        self._require_tensor(out)
        chunks = self._require_chunks(out, chunks) if self.rank == root else None
        transfer = self._transport.scatter(out, chunks, root)
        return self._run("scatter", out, transfer, out, async_op, root_detail(root))

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
        """This rank's part of the reduction: dim 0 is split into equal parts, or into `sizes`. `out` saves memory."""
        parts = self._split_sizes("reduce_scatter", tensor, sizes)
        op = self._checked_reduction(tensor, op, factor)
        out = self._output("reduce_scatter", out, tensor, (parts[self.rank], *tensor.shape[1:]))
        transfer = self._transport.reduce_scatter(out, tensor, parts, op, factor)
        return self._run("reduce_scatter", tensor, transfer, out, async_op, op_detail(op))

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
        even = send_sizes is None and recv_sizes is None
        outgoing = self._split_sizes("all_to_all", tensor, send_sizes)
        incoming = self._incoming(outgoing, send_sizes, recv_sizes)
        out = self._output("all_to_all", out, tensor, (sum(incoming), *tensor.shape[1:]))
        transfer = self._transport.all_to_all(out, tensor, incoming, outgoing, even)
        return self._run("all_to_all", tensor, transfer, out, async_op, "" if even else UNEVEN)

    def barrier(self, *, async_op: bool = False) -> Outcome:
        """No rank leaves before all have come."""
        return self._run("barrier", None, self._transport.barrier(), None, async_op)

    def _require_chunks(
        self, out: torch.Tensor, chunks: Sequence[torch.Tensor] | torch.Tensor | None
    ) -> Sequence[torch.Tensor] | torch.Tensor:
        chunks = () if chunks is None else chunks
        if not isinstance(chunks, (Sequence, torch.Tensor)):
            raise UsageError(f"scatter: the root needs {self.size} tensors or one of {self.size} rows, not {chunks!r}")
        if isinstance(chunks, torch.Tensor) and chunks.shape == (self.size, *out.shape) and chunks.dtype == out.dtype:
            self._require_tensor(chunks)
            return chunks
        for chunk in chunks:
            self._require_tensor(chunk)
        if len(chunks) != self.size or any(each.shape != out.shape or each.dtype != out.dtype for each in chunks):
            given = [(chunk.dtype, tuple(chunk.shape)) for chunk in chunks]
            raise UsageError(
                f"scatter: the root needs {self.size} chunks of {out.dtype} {tuple(out.shape)}, but got {given}"
            )
        return list(chunks)

    def _incoming(
        self, outgoing: list[int], send_sizes: Sequence[int] | None, recv_sizes: Sequence[int] | None
    ) -> list[int]:
        """The length of dim 0 that each rank sends."""
        if recv_sizes is None:
            return outgoing if send_sizes is None else self._sizes_from_others(outgoing)
        sizes = whole_numbers("all_to_all: recv_sizes", recv_sizes)
        if len(sizes) != self.size or min(sizes) < 0:
            raise UsageError(f"all_to_all: recv_sizes {sizes}; expected {self.size} sizes of at least 0")
        if sizes[self.rank] != outgoing[self.rank] and not self.is_simulated:
            raise UsageError(
                f"all_to_all: rank {self.rank} sends {outgoing[self.rank]} to itself, but recv_sizes {sizes} has "
                f"{sizes[self.rank]} at that index"
            )
        if self._watchdog.checks and (sent := self._sizes_from_others(outgoing)) != sizes:
            raise UsageError(f"all_to_all: recv_sizes {sizes}, but the others send {sent}")
        return sizes

    def _sizes_from_others(self, outgoing: list[int]) -> list[int]:
        if self.is_simulated:  # what each of the others has for this rank is what this rank has for itself
            return [outgoing[self.rank]] * self.size
        sizes = torch.tensor(outgoing)
        received = torch.empty_like(sizes)
        dist.all_to_all_single(received, sizes, group=self.group)
        return received.tolist()
