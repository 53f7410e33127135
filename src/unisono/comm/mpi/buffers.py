"""Tensors as MPI sees them: an address, a count, a datatype. Imports mpi4py, so import it late.

At the end: whether MPI takes GPU memory, and whether reductions of it are then folded by torch (`agree`, `folds`).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from mpi4py import MPI

from unisono.errors import CommError, UsageError

# Without a count: mpi4py then works it out from the length, and in blocks where a collective works in blocks.
Buffer = tuple[MPI.memory, MPI.Datatype]
PiecewiseBuffer = tuple[MPI.memory, tuple[list[int], list[int]], MPI.Datatype]  # counts and starts

# Data that is only moved is typed by the size of its elements: MPI need not know the dtype.
DATA_TYPES = {
    1: MPI.UINT8_T,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}
# Data that is reduced has its own type. These are the wire dtypes of unisono.comm.reduction.
NUMBERS = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
OPS = {
    "sum": MPI.SUM,
    "product": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}
# How many elements one call takes: before MPI 4 they are counted in an int.
AT_ONCE = 2**62 if MPI.Get_version() >= (4, 0) else 2**31 - 1


def raw_buffer(memory: torch.Tensor) -> Buffer:
    """Contiguous memory whose elements MPI only moves."""
    return MPI.memory.fromaddress(memory.data_ptr(), memory.nbytes), DATA_TYPES[memory.itemsize]


def raw_parts(memory: torch.Tensor, counts: Sequence[int]) -> PiecewiseBuffer:
    """Contiguous memory as consecutive chunks, `counts` elements each, for MPI's v-collectives."""
    if memory.numel() > AT_ONCE:
        raise CommError(
            f"gather, scatter and all_to_all of {memory.numel()} elements on one rank need an MPI-4 library, "
            f"such as MPICH 4 or newer; the one loaded has MPI {'.'.join(map(str, MPI.Get_version()))}"
        )
    starts = [0] * len(counts)
    for index in range(1, len(counts)):
        starts[index] = starts[index - 1] + counts[index - 1]
    address = MPI.memory.fromaddress(memory.data_ptr(), memory.nbytes)
    return address, (list(counts), starts), DATA_TYPES[memory.itemsize]


def number_buffer(memory: torch.Tensor) -> Buffer:
    """Contiguous memory as numbers that MPI computes with."""
    return MPI.memory.fromaddress(memory.data_ptr(), memory.nbytes), NUMBERS[memory.dtype]


def chunks_of(memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous memory in chunks that one MPI call can take."""
    if memory.numel() <= AT_ONCE:
        yield memory
    else:
        yield from memory.view(-1).split(AT_ONCE)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a CPU tensor whose memory MPI can work on; quick to answer."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether MPI can work on the tensor's own memory."""
    if tensor.layout is not torch.strided:
        raise UsageError(f"MPI was given a tensor of layout {tensor.layout}; pass a dense one (x.to_dense())")
    is_reachable = tensor.is_cpu or (tensor.is_cuda and cuda_aware())
    return is_reachable and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Memory with the tensor's elements in order: its own where MPI can read that, else a copy."""
    return ready(tensor if is_direct(tensor) else _blank(tensor).copy_(tensor))


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for the tensor's elements in order: its own where MPI can write that, else new. See `land`."""
    return ready(tensor if is_direct(tensor) else _blank(tensor))


def ready(memory: torch.Tensor) -> torch.Tensor:
    """The same memory, once what this stream has queued is over: MPI knows no streams.

    New memory is no exception: torch hands out what a kernel in the queue may still be working on.
    """
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()
    return memory


def computable(tensor: torch.Tensor) -> torch.Tensor:
    """As `readable`, for numbers that MPI computes with: on the host.

    An MPI that takes GPU memory moves it. Open MPI's non-blocking reductions read it as if it were the CPU's, and
    crash; MPICH's copy it to the host themselves.
    """
    return _pinned(tensor.shape, tensor.dtype).copy_(tensor) if tensor.is_cuda else readable(tensor)


def room_to_compute(tensor: torch.Tensor) -> torch.Tensor:
    """As `writable`, for what MPI computes: on the host."""
    return _pinned(tensor.shape, tensor.dtype) if tensor.is_cuda else writable(tensor)


def land(memory: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bring what MPI wrote to where it belongs."""
    if memory.data_ptr() != tensor.data_ptr():
        tensor.copy_(memory.view(tensor.shape))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors end to end, for reading; without a copy when they are adjacent in memory already."""
    together = _adjacent(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if together is None else together


def joint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Memory for the tensors end to end, for writing; theirs when they are adjacent. See `land_parts`."""
    together = _adjacent(tensors)
    if together is None:
        return ready(_blank(tensors[0], (sum(tensor.numel() for tensor in tensors),)))
    return writable(together)


def land_parts(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Bring what MPI wrote end to end to the tensors it is for."""
    parts = memory.view(-1).split([tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        if tensor.numel():
            land(part, tensor)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous chunks of memory share a byte, which MPI forbids between input and output."""
    start, end = one.data_ptr(), one.data_ptr() + one.nbytes
    return start < other.data_ptr() + other.nbytes and other.data_ptr() < end


_FEW = 4  # ranks up to which each may receive all ranks' tensors; a reduction in MPI moves each of them twice at most
_ROOM = 2**30  # bytes that may be allocated beside the tensors
_everywhere = False


def agree(world: MPI.Intracomm) -> None:
    """Learn whether every rank's MPI takes GPU memory. All ranks must fold, or none: they make other calls then."""
    global _everywhere
    here = torch.version.cuda is not None and cuda_aware()
    _everywhere = bool(world.allreduce(int(here), MPI.MIN))


def folds(wire: torch.Tensor, ranks: int) -> bool:
    """Whether torch, not MPI, reduces what `ranks` ranks have of this, on the GPU, in rank order.

    An MPI that takes GPU memory moves it from GPU to GPU, but computes on the host. The answer is the same on all
    ranks, where all have the tensor on a GPU or none has.
    """
    return _everywhere and wire.is_cuda and ranks <= _FEW and ranks * wire.nbytes <= _ROOM


@cache
def cuda_aware() -> bool:
    """Whether the loaded MPI library reports that it takes pointers to GPU memory."""
    query = getattr(_loaded_library("mpi(?:ch)?"), "MPIX_Query_cuda_support", None)
    if query is None or not query():
        return False
    # Open MPI 4 answers for how it was built. That it finds no driver, or was configured not to look, is in a variable.
    try:
        return ctypes.c_bool.in_dll(_loaded_library("open-pal"), "opal_cuda_support").value  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True


def _loaded_library(name: str) -> ctypes.CDLL | None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    found = re.search(rf"(/.*/lib{name}\.so.*)", maps.read_text())
    return ctypes.CDLL(found.group(1)) if found else None


def _blank(like: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    shape = like.shape if shape is None else shape
    if like.is_cuda and not cuda_aware():
        return _pinned(shape, like.dtype)
    if like.device.type not in ("cpu", "cuda"):
        raise UsageError(f"MPI was given a tensor on {like.device}; it takes tensors on cpu and cuda")
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        if not is_direct(tensor) or tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != end:
            return None
        end += tensor.nbytes
    total = sum(tensor.numel() for tensor in tensors)
    return first.as_strided((total,), (1,), first.storage_offset())
