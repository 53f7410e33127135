"""Tensors' own memory as MPI moves it. Imports mpi4py: import it late."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

_SHORT = 2**31 - 1  # bytes that every MPI takes in one call
_address = MPI.memory.fromaddress


class Memory:
    """Where a tensor lies, and how MPI is told so."""

    __slots__ = ("address", "buffer", "dtype", "nbytes", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self.buffer = (_address(self.address, self.nbytes), MPI.BYTE)


class Pair:
    """The memory for what is received and for what is sent, of one dtype and apart, as MPI wants them."""

    __slots__ = ("alike", "dtype", "into", "of", "parts", "received", "rows_received", "rows_sent", "sent", "shape")

    def __init__(self, received: Memory, sent: Memory) -> None:
        self.received, self.sent = received, sent
        self.into, self.of = received.buffer, sent.buffer
        self.shape, self.dtype = sent.shape, sent.dtype
        self.alike = received.shape == sent.shape
        # How many times the one is a row of the other; 0 where it is none.
        self.rows_received = _rows(received, sent)
        self.rows_sent = _rows(sent, received)
        self.parts = _parts(sent, received)


def _rows(whole: Memory, row: Memory) -> int:
    return whole.shape[0] if whole.shape[1:] == row.shape and whole.shape else 0


def _parts(whole: Memory, part: Memory) -> int:
    """Into how many such parts dim 0 of the whole is cut; 0 where it cannot be."""
    if not whole.shape or not part.shape or not part.shape[0] or whole.shape[1:] != part.shape[1:]:
        return 0
    parts, rest = divmod(whole.shape[0], part.shape[0])
    return 0 if rest else parts


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """A tensor's own memory, or None where MPI cannot use it as it lies."""
    if (
        not isinstance(tensor, torch.Tensor)
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_conj()
    ):
        return None
    memory = Memory(tensor)
    return memory if memory.nbytes <= _SHORT else None


def pair_of(received: torch.Tensor, sent: torch.Tensor) -> Pair | None:
    """The memory of both, or None where MPI cannot use them as they lie, one beside the other."""
    into, of = memory_of(received), memory_of(sent)
    if into is None or of is None or into.dtype != of.dtype or not _apart(into, of):
        return None
    return Pair(into, of)


def _apart(one: Memory, other: Memory) -> bool:
    """Whether two pieces of memory do not overlap, which MPI forbids."""
    return one.address + one.nbytes <= other.address or other.address + other.nbytes <= one.address


def joined_view(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The chunks one after the other in memory: as they are, where they lie so in one storage, else copied together."""
    first = chunks[0]
    start, step, storage = first.data_ptr(), first.nbytes, first.untyped_storage().data_ptr()
    lie_so = all(
        chunk.is_contiguous()
        and chunk.data_ptr() == start + number * step
        and chunk.untyped_storage().data_ptr() == storage  # others may lie there by chance
        and not chunk.is_conj()
        and not chunk.is_neg()
        for number, chunk in enumerate(chunks)
    )
    if lie_so:
        return first.detach().as_strided((len(chunks) * first.numel(),), (1,), first.storage_offset())
    return torch.stack([chunk.detach() for chunk in chunks])
