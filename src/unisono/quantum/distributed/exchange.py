"""Exchange of blocks of the state between ranks, in place, through buffers of bounded size.

Ranks of one host use shared memory (shared_memory.py), others by messages."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.quantum.distributed.local_steps import LocalExchange
from unisono.quantum.distributed.shared_memory import known, staging
from unisono.quantum.kernels.reference import block

DEFAULT_CHUNK = 64 << 20  # bytes of all buffers together
_SHARED = 8 << 20  # bytes of a rank's slots in shared memory: what is packed is still in cache when it is unpacked
_BUFFERS = 4  # two to send and two to receive: one pair travels while the other is packed


def exchange_blocks(local: torch.Tensor, step: LocalExchange, comm: Communicator, chunk: int = DEFAULT_CHUNK) -> None:
    """Do one exchange. A pair of ranks walks the same chunks in the same order, so chunks match."""
    shared = staging(comm, min(chunk, _SHARED, 2 * local.nbytes)) if local.device.type == "cpu" else None
    for each in step.blocks:
        if shared is not None and shared.reaches(each.partner):
            parts = _split(block(local, step.axes, each.block), max(1, shared.slot // local.element_size()))
            shared.exchange_blocks(parts, each.partner)
        else:
            limit = max(1, chunk // (_BUFFERS * local.element_size()))
            _send(list(_split(block(local, step.axes, each.block), limit)), each.partner, comm)


def borrow(
    local: torch.Tensor, partner: int, comm: Communicator, chunk: int = DEFAULT_CHUNK
) -> Iterator[tuple[int, torch.Tensor]]:
    """The partner's array, which it lends a chunk at a time while it borrows this rank's: (offset, chunk) pairs."""
    shared = staging(comm, min(chunk, _SHARED, 2 * local.nbytes)) if local.device.type == "cpu" else None
    if shared is not None and shared.reaches(partner):
        yield from shared.borrow(chunks(local, _BUFFERS * shared.slot), partner)
        return
    for offset, mine in chunks(local, chunk):
        theirs = torch.empty_like(mine)
        comm.exchange([(mine, partner)], [(theirs, partner)])
        yield offset, theirs


def summed(value: torch.Tensor, comm: Communicator) -> float:
    """The sum over ranks, on every rank; those of one host that have exchanged blocks need no message for it."""
    shared = known(comm)
    if shared is not None and shared.has_all:
        return shared.total(float(value))
    return float(comm.all_reduce(value))


def chunks(local: torch.Tensor, chunk: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The array in parts of a power of two, so that four of them make a chunk, with their offsets."""
    width = 1 << (max(1, chunk // (_BUFFERS * local.element_size())).bit_length() - 1)
    for offset in range(0, len(local), width):
        yield offset, local[offset : offset + width]


def _send(parts: list[torch.Tensor], partner: int, comm: Communicator) -> None:
    """Exchange chunks as messages: while one pair of buffers travels, the other is packed."""
    size = max(part.numel() for part in parts)
    buffers = [parts[0].new_empty(size) for _ in range(min(_BUFFERS, 2 * len(parts)))]
    waiting: tuple[Handle, torch.Tensor, torch.Tensor] | None = None
    for number, part in enumerate(parts):
        out, into = buffers[2 * (number % 2)], buffers[2 * (number % 2) + 1]
        out, into = out[: part.numel()], into[: part.numel()]
        out.view(part.shape).copy_(part)
        handle = comm.exchange([(out, partner)], [(into, partner)], async_op=True)
        _unpack(waiting)
        waiting = (handle, part, into)
    _unpack(waiting)


def _unpack(waiting: tuple[Handle, torch.Tensor, torch.Tensor] | None) -> None:
    if waiting:
        handle, part, into = waiting
        handle.wait()
        part.copy_(into.view(part.shape))


def _split(view: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    if view.numel() <= limit:
        yield view
    elif len(view) == 1:
        yield from _split(view[0], limit)
    else:
        for half in view.chunk(2):
            yield from _split(half, limit)
