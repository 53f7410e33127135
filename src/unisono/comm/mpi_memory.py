"""Tensors' own memory as MPI moves it, remembered from call to call. Imports mpi4py: import it late.

Note: why it is remembered. Right after a megabyte has been moved the caches are cold, and a dozen questions to tensors
take a fifth of the whole operation. A tensor that was seen before is not asked at all while it lies where it lay
(unisono.comm.snapshot).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from mpi4py import MPI

from unisono.comm import snapshot

_SHORT = 2**31 - 1  # bytes that every MPI takes in one call
_WORTH = 2**16  # bytes from which on remembering pays
_address = MPI.memory.fromaddress


class Memory:
    """Where a tensor lies, and how MPI is told so."""

    __slots__ = ("address", "buffer", "dtype", "nbytes", "reference", "shape", "snapshot")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = tensor.data_ptr()
        self.shape = tuple(tensor.shape)  # a torch.Size would bring torch's code back into the cache
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self.buffer = (_address(self.address, self.nbytes), MPI.BYTE)
        # Of one that is remembered:
        self.reference: weakref.ref[torch.Tensor] | None = None
        self.snapshot: snapshot.Snapshot | snapshot.Questions


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


_seen: dict[int, Memory] = {}  # by id of the tensor, as long as that lives
_pairs: dict[tuple[int, int], Pair] = {}  # of tensors in `_seen`


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """A tensor's own memory, or None where MPI cannot use it as it lies."""
    memory = _seen.get(id(tensor))
    if memory is not None and memory.snapshot.is_true(tensor):
        return memory
    return _new_memory(tensor)


def pair_of(received: torch.Tensor, sent: torch.Tensor) -> Pair | None:
    """The memory of both, or None where MPI cannot use them as they lie, one beside the other."""
    pair = _pairs.get((id(received), id(sent)))
    if pair is not None and pair.received.snapshot.is_true(received) and pair.sent.snapshot.is_true(sent):
        return pair
    return _new_pair(received, sent)


def _new_pair(received: torch.Tensor, sent: torch.Tensor) -> Pair | None:
    into, of = memory_of(received), memory_of(sent)
    if into is None or of is None or into.dtype != of.dtype or not _apart(into, of):
        return None
    pair = Pair(into, of)
    if into.reference is not None and of.reference is not None:
        _pairs[id(received), id(sent)] = pair
    return pair


def _new_memory(tensor: torch.Tensor) -> Memory | None:
    if (
        not isinstance(tensor, torch.Tensor)
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_conj()
    ):
        return None
    memory = Memory(tensor)
    if memory.nbytes > _SHORT:
        return None
    # A complex tensor may become its own conjugate where it lies (x.data = x.data.conj()): it is asked every time.
    if memory.nbytes >= _WORTH and not memory.dtype.is_complex:
        key = id(tensor)
        memory.reference = weakref.ref(tensor, lambda _: _forget(key))
        memory.snapshot = snapshot.take(tensor)
        _seen[key] = memory
    return memory


def _forget(key: int) -> None:
    _seen.pop(key, None)
    for pair in [pair for pair in _pairs if key in pair]:
        del _pairs[pair]


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
