"""Trading blocks of the state between ranks, in place, through buffers of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.quantum.blocks import block
from unisono.quantum.program import Trades

DEFAULT_CHUNK = 64 << 20  # bytes of all buffers together
_BUFFERS = 4  # two to send and two to receive: one pair travels while the other is packed


def trade(local: torch.Tensor, step: Trades, comm: Communicator, chunk: int = DEFAULT_CHUNK) -> None:
    """Do one exchange. A pair of ranks walks the same pieces in the same order, so each piece finds its place."""
    pieces = [(piece, each.partner) for each in step.trades for piece in _pieces(local, step, each.block, chunk)]
    if not pieces:
        return
    size = max(piece.numel() for piece, _ in pieces)
    buffers = [torch.empty(size, dtype=local.dtype, device=local.device) for _ in range(min(_BUFFERS, 2 * len(pieces)))]
    waiting: tuple[Handle, torch.Tensor, torch.Tensor] | None = None
    for number, (piece, partner) in enumerate(pieces):
        out, into = buffers[2 * (number % 2)], buffers[2 * (number % 2) + 1]
        out, into = out[: piece.numel()], into[: piece.numel()]
        out.view(piece.shape).copy_(piece)
        handle = comm.exchange([(out, partner)], [(into, partner)], async_op=True)
        _unpack(waiting)
        waiting = (handle, piece, into)
    _unpack(waiting)


def _unpack(waiting: tuple[Handle, torch.Tensor, torch.Tensor] | None) -> None:
    if waiting:
        handle, piece, into = waiting
        handle.wait()
        piece.copy_(into.view(piece.shape))


def _pieces(local: torch.Tensor, step: Trades, value: int, chunk: int) -> Iterator[torch.Tensor]:
    limit = max(1, chunk // (_BUFFERS * local.element_size()))
    return _split(block(local, step.axes, value), limit)


def _split(view: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    if view.numel() <= limit:
        yield view
    elif len(view) == 1:
        yield from _split(view[0], limit)
    else:
        for half in view.chunk(2):
            yield from _split(half, limit)
