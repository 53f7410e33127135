"""Arrays of amplitudes, in whole pages of their own.

torch's allocator may begin a large array in the middle of a huge page, and then takes up to two more megabytes than
asked for; and it may keep what was freed. A state has neither to spare: it has pages of its own, and what the C library
keeps of freed memory (schedules, programs, imports) goes back to the system before they are taken."""

from __future__ import annotations

import ctypes
import mmap

import torch

_HUGE = 2 << 20  # bytes of a huge page
_LEAST = 4 << 20  # bytes; below, torch's allocator
_LIBRARY = ctypes.CDLL(None)


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat array of zeros; on a CPU, memory is taken as it is written to, and given back when the array goes."""
    size = count * dtype.itemsize
    if device.type != "cpu" or size < _LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype, device=device)
    _give_back()
    pages = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE
    pages.madvise(mmap.MADV_HUGEPAGE, begin, size // _HUGE * _HUGE)
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=begin)


def _give_back() -> None:
    """Free pages of the heap, to the system; glibc alone has a call for it."""
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


def zeros_like(amplitudes: torch.Tensor) -> torch.Tensor:
    return zeros(amplitudes.numel(), amplitudes.dtype, amplitudes.device)
