"""Collectives with gradients: pairs of operations, each of which is the other's gradient.

A tensor that all ranks hold in common ("full") has one gradient, the same on all of them; ranks that each used it for
a part of the work have a part of that gradient, to be summed. So what is free in the forward communicates in the
backward, and the other way round:

    forward                          backward
    copy             (nothing)       all-reduce          full -> used by every rank in another way
    reduce           all-reduce      (nothing)           a part of a sum on every rank -> full
    gather           all-gather      slice               a shard on every rank -> full
    split            slice           all-gather          full -> this rank's shard
    gather_to_use    all-gather      reduce-scatter      a shard -> full, used by every rank in another way
    reduce_to_shard  reduce-scatter  all-gather          a part of a sum -> this rank's shard of the sum
    count_once       (nothing)       zero, but on rank 0  full, whose gradient all ranks compute and is summed later

`lengths` are those of all ranks' shards along `dim`; they may differ.

What `copy` and `gather_to_use` send in the backward is begun by one node of autograd's graph and waited for by another,
so that something else can be computed in between (see deferred).

Under `create_graph=True` each backward is the differentiable operation of the table, so that second derivatives are
those of one device. A function without a second derivative is marked: `first_order_only`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.collective_ops import eager_only, number_of
from unisono.torch_compat import is_compiling, is_functorch_wrapped

Lengths = Sequence[int]


def require_eager(x: Any, what: str) -> None:
    """UsageError inside torch.func's transforms (vmap, grad, jvp), which cannot see through a collective."""
    if isinstance(x, torch.Tensor) and is_functorch_wrapped(x):
        raise UsageError(
            f"{what} inside a transform of torch.func (vmap, grad or jvp), which cannot see through it; call the "
            "layer on the batch, outside of the transform, or use a plan without tp, recompute and zero=3"
        )


@eager_only
def copy(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    if comm.size == 1:
        return x
    require_eager(x, "a sharded layer runs")
    if is_compiling():
        return _TracedCopy.apply(x, comm)
    summing: _UnderWay = []
    return _started(_Copy.apply(_Wait.apply(x, summing), comm, summing))


@eager_only
def reduce(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    require_eager(x, "a sharded layer runs")
    return x if comm.size == 1 else _Reduce.apply(x, comm)


@eager_only
def gather(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    require_eager(x, "a sharded layer runs")
    return x if comm.size == 1 else _Gather.apply(x, dim % x.dim(), lengths, comm)


@eager_only
def split(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    require_eager(x, "a sharded layer runs")
    return x if comm.size == 1 else _Split.apply(x, dim % x.dim(), lengths, comm)


@eager_only
def gather_to_use(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    if comm.size == 1:
        return x
    if is_compiling():
        return _TracedGatherToUse.apply(x, dim % x.dim(), lengths, comm)
    summing: _UnderWay = []
    return _started(_GatherToUse.apply(_Wait.apply(x, summing), dim % x.dim(), lengths, comm, summing))


@eager_only
def reduce_to_shard(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    return x if comm.size == 1 else _ReduceToShard.apply(x, dim % x.dim(), lengths, comm)


@eager_only
def count_once(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    return x if comm.size == 1 else _CountOnce.apply(x, comm.rank == 0)


def before_start(x: torch.Tensor) -> int | None:
    """A sequence number for what is to run between the start of the sum that x ends in and the wait for it."""
    node: Any = x.grad_fn
    return node._sequence_nr() - 1 if getattr(node, "is_start", False) and _can_order(node) else None


def _can_order(node: Any) -> bool:
    return hasattr(node, "_set_sequence_nr")  # private to PyTorch, which may take it away


def _started(x: torch.Tensor) -> torch.Tensor:
    """Leave a sequence number free between the two nodes."""
    start: Any = x.grad_fn
    if start is not None and _can_order(start):
        start.is_start = True
        wait = start.next_functions[0][0]
        wait._set_sequence_nr(max(start._sequence_nr() - 2, 0))
    return x


def first_order_only(what: str, instead: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For the backward of a function: refuses `create_graph=True`, which asks for its derivative."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def guarded(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():
                raise UsageError(f"a gradient of a gradient (create_graph=True) through {what}; {instead}")
            return backward(ctx, *grads)

        return guarded

    return decorate


_UnderWay = list[Callable[[], torch.Tensor]]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, summing: _UnderWay) -> torch.Tensor:
        ctx.summing = summing
        return x.detach()  # not a view: a view would keep x, which keeps it (see region), alive for ever

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad if torch.is_grad_enabled() else ctx.summing.pop()(), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator, summing: _UnderWay) -> torch.Tensor:
        ctx.comm, ctx.summing = comm, summing
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return reduce(grad, ctx.comm), None, None
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.summing.append(ctx.comm.all_reduce(total, async_op=True).wait)
        return grad, None, None  # which nobody reads: the sum replaces it


class _TracedCopy(torch.autograd.Function):
    """In a graph that is compiled: the sum is an op, which is begun and waited for in one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _summed(grad, ctx.comm), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return _summed(x, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return copy(grad, ctx.comm) if _is_second_order() else grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.comm = dim, lengths, comm
        return _joined(x, dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return split(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.comm = dim, lengths, comm
        return _shard(x, dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return gather(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None


class _GatherToUse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator, summing: _UnderWay
    ) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.comm, ctx.summing = dim, lengths, comm, summing
        ctx.shape = x.shape
        return _joined(x, dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return reduce_to_shard(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None, None
        ctx.summing.append(_start_shard_of_sum(grad, ctx.dim, ctx.lengths, ctx.comm))
        return grad.new_zeros(()).expand(ctx.shape), None, None, None, None


class _TracedGatherToUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.comm = dim, lengths, comm
        return _joined(x, dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _shard_of_sum(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None


class _ReduceToShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.comm = dim, lengths, comm
        return _shard_of_sum(x, dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if _is_second_order():
            return gather_to_use(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None
        return _joined(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None


class _CountOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: bool) -> torch.Tensor:
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad if ctx.counts else grad * 0, None


def unlinked(x: torch.Tensor) -> torch.Tensor:
    """x, for a custom Function to return: of a view that was made inside of one, autograd refuses changes in place."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


def _is_second_order() -> bool:
    """Whether a backward is itself to be differentiated. In a trace, gradients are always on, and that is not so."""
    return torch.is_grad_enabled() and not is_compiling()


def _summed(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    if is_compiling():
        return torch.ops.unisono.all_reduce(x, number_of(comm))
    total = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total)
    return total


def _shard(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    return x.narrow(dim, sum(lengths[: comm.rank]), lengths[comm.rank]).clone(memory_format=torch.contiguous_format)


def _joined(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    longest = max(lengths)
    rows = x.movedim(dim, 0)
    if len(rows) < longest:
        rows = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    if is_compiling():
        joined = torch.ops.unisono.all_gather_rows(rows, number_of(comm), comm.size)
    else:
        joined = rows.new_empty(comm.size * longest, *rows.shape[1:])
        comm.all_gather_into(joined, rows.contiguous())
    if min(lengths) < longest:
        joined = torch.cat([joined[r * longest : r * longest + length] for r, length in enumerate(lengths)])
    joined = joined.movedim(0, dim).contiguous()
    return joined if is_compiling() else unlinked(joined)


def _shard_of_sum(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    return _start_shard_of_sum(x, dim, lengths, comm)()


def _start_shard_of_sum(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> Callable[[], torch.Tensor]:
    longest = max(lengths)
    rows = x.movedim(dim, 0)
    if min(lengths) < longest:
        shards = rows.split(list(lengths))
        rows = torch.cat(
            [
                part
                for shard in shards
                for part in (shard, rows.new_zeros(longest - len(shard), *rows.shape[1:]))
                if len(part)
            ]
        )
    if is_compiling():
        shard = torch.ops.unisono.reduce_scatter_rows(rows, number_of(comm), comm.size)
        return lambda: shard[: lengths[comm.rank]].movedim(0, dim).contiguous()
    handle = comm.reduce_scatter(rows.contiguous(), async_op=True)
    return lambda: unlinked(handle.wait()[: lengths[comm.rank]].movedim(0, dim).contiguous())
