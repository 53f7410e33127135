"""Conjugates: pairs of operations, each of which is the other's gradient.

A tensor that all ranks hold in common ("whole") has one gradient, the same on all of them; ranks that each used it for
a part of the work have a part of that gradient, to be summed. So what is free in the forward talks in the backward,
and the other way round:

    forward                          backward
    copy             (nothing)       all-reduce          whole -> used by every rank in another way
    reduce           all-reduce      (nothing)           a part of a sum on every rank -> whole
    gather           all-gather      cut                 a piece on every rank -> whole
    split            cut             all-gather          whole -> this rank's piece
    gather_to_use    all-gather      reduce-scatter      a piece -> whole, used by every rank in another way
    reduce_to_piece  reduce-scatter  all-gather          a part of a sum -> this rank's piece of the sum

`lengths` are those of all ranks' pieces along `dim`; they may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.comm.communicator import Communicator

Lengths = Sequence[int]


def copy(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    return x if comm.size == 1 else _Copy.apply(x, comm)


def reduce(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    return x if comm.size == 1 else _Reduce.apply(x, comm)


def gather(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    return x if comm.size == 1 else _Gather.apply(x, dim % x.dim(), lengths, comm)


def split(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    return x if comm.size == 1 else _Split.apply(x, dim % x.dim(), lengths, comm)


def gather_to_use(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    return x if comm.size == 1 else _GatherToUse.apply(x, dim % x.dim(), lengths, comm)


def reduce_to_piece(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    return x if comm.size == 1 else _ReduceToPiece.apply(x, dim % x.dim(), lengths, comm)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.detach()  # not a view: a view would keep x, which keeps it (see region), alive for ever

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _summed(grad, ctx.comm), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        return _summed(x, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.comm = dim, lengths, comm
        return _joined(x, dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _piece(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.comm = dim, lengths, comm
        return _piece(x, dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _joined(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None


class _GatherToUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.comm = dim, lengths, comm
        return _joined(x, dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _piece_of_sum(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None


class _ReduceToPiece(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.comm = dim, lengths, comm
        return _piece_of_sum(x, dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _joined(grad, ctx.dim, ctx.lengths, ctx.comm), None, None, None


def _summed(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total)
    return total


def _piece(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    return x.narrow(dim, sum(lengths[: comm.rank]), lengths[comm.rank]).clone(memory_format=torch.contiguous_format)


def _joined(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    longest = max(lengths)
    rows = x.movedim(dim, 0)
    if len(rows) < longest:
        rows = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    joined = rows.new_empty(comm.size * longest, *rows.shape[1:])
    comm.all_gather_into(joined, rows.contiguous())
    if min(lengths) < longest:
        joined = torch.cat([joined[r * longest : r * longest + length] for r, length in enumerate(lengths)])
    return joined.movedim(0, dim).contiguous()


def _piece_of_sum(x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
    longest = max(lengths)
    rows = x.movedim(dim, 0)
    if min(lengths) < longest:
        padded = rows.new_zeros(comm.size * longest, *rows.shape[1:])
        for rank, piece in enumerate(rows.split(list(lengths))):
            padded[rank * longest : rank * longest + len(piece)] = piece
        rows = padded
    reduced = comm.reduce_scatter(rows.contiguous())
    return reduced[: lengths[comm.rank]].movedim(0, dim).contiguous()
