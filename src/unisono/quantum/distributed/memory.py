"""Memory of a state: whether it fits, before anything is allocated; and arrays of amplitudes in pages of their own.

torch's allocator may begin a large array in the middle of a huge page, and then takes up to two more megabytes than
asked for; and it may keep what was freed. So a state has pages of its own (`zeros`), and what the C library keeps of
freed memory (schedules, programs, imports) is returned to the system before they are allocated.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

from unisono.amounts import format_bytes
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError

_CGROUP = Path("/sys/fs/cgroup")
_ALWAYS = 32 << 20  # bytes that are never asked about: layers make many small states
_HUGE = 2 << 20  # bytes of a huge page
_LEAST = 4 << 20  # bytes; below, torch's allocator
_LIBRARY = ctypes.CDLL(None)


def local_bytes(wires: int, global_qubits: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's part of a state."""
    return dtype.itemsize << (wires - global_qubits)


def free_bytes(device: torch.device) -> int:
    """What can still be allocated: a GPU's free memory; else the host's, or the container's where that is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def require_room(
    wires: int,
    global_qubits: int,
    dtype: torch.dtype,
    device: torch.device,
    buffers: int,
    comm: Communicator | None,
    what: str = "a state",
    states: int = 1,
) -> None:
    """Refuse, on all ranks alike, what does not fit, `states` states that is; report what it needs and how many ranks
    would do."""
    need = states * local_bytes(wires, global_qubits, dtype)
    need += min(buffers, 2 * local_bytes(wires, global_qubits, dtype)) if global_qubits else 0
    if need <= _ALWAYS:
        return
    sharing = comm.local_size if comm is not None and device.type == "cpu" else 1
    free = torch.tensor([free_bytes(device) // sharing], dtype=torch.int64, device=device)
    if comm is not None and comm.size > 1:
        comm.all_reduce(free, op="min")
    room = int(free)
    if need <= room:
        return
    enough = global_qubits
    while enough < wires and states * local_bytes(wires, enough, dtype) + buffers > room:
        enough += 1
    ranks = f"2^{enough}" if enough > 20 else f"{2**enough}"
    hint = f"{ranks} ranks with as much free memory each would do"
    if states * local_bytes(wires, enough, dtype) + buffers > room:
        hint = "no number of ranks with so little memory would do"
    elif dtype == torch.complex128 and states * local_bytes(wires, global_qubits, torch.complex64) + buffers <= room:
        hint += ", or dtype=torch.complex64"
    raise UsageError(
        f"{what} of {wires} wires in {str(dtype).removeprefix('torch.')} needs {format_bytes(need)} on each of "
        f"{2**global_qubits} rank{'s' if global_qubits else ''}, but {format_bytes(room)} is free; {hint}"
    )


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
