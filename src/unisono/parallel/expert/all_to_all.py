"""All-to-all that gradients flow back through: what went to a rank comes back from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.comm.communicator import Communicator


def all_to_all(
    rows: torch.Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], comm: Communicator
) -> torch.Tensor:
    """send_sizes[r] rows (of dim 0) go to rank r; returns the recv_sizes[r] rows of each rank r, in that order."""
    if comm.size == 1:
        return rows
    return _AllToAll.apply(rows, tuple(send_sizes), tuple(recv_sizes), comm)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send_sizes: tuple[int, ...], recv_sizes: tuple[int, ...], comm: Communicator
    ) -> torch.Tensor:
        ctx.send_sizes, ctx.recv_sizes, ctx.comm = send_sizes, recv_sizes, comm
        return comm.all_to_all(rows.contiguous(), send_sizes, recv_sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _AllToAll.apply(grad, ctx.recv_sizes, ctx.send_sizes, ctx.comm), None, None, None
