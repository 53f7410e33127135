"""The GPU kernel: programs in tiles of shared memory, in place, compiled at run time through torch.

A row of a tile is one amplitude, so there are no lanes, and every bit can be mixed by any tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.quantum.arguments import require_device
from unisono.quantum.circuit.commutation import mixed_wires
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.compile.assembly import Code
from unisono.quantum.compile.compiled import assemble_linear, narrowed
from unisono.quantum.kernels import code as fields
from unisono.quantum.kernels import gpu_program
from unisono.quantum.kernels.gpu_program import OP_FIELDS, SWAPPED, GpuProgram, Passes, Scaling

THREADS = 256  # of a block
BLOCKS = {torch.complex64: 3, torch.complex128: 3}  # that a multiprocessor has at a time: as registers allow
BLOCKS_BACK = {torch.complex64: 2, torch.complex128: 2}  # for gradients
TOGETHER = {torch.complex64: 4, torch.complex128: 3}  # bits turned in one pass, as registers allow
WIDEST = 11  # wires of a matrix: a block has 2^11 new amplitudes in registers
ROW_BITS = {torch.complex64: 12, torch.complex128: 11}  # 32 KiB a tile; two of them for gradients
NEAR = {torch.complex64: 4, torch.complex128: 3}  # low bits that every tile has: 128 bytes are adjacent
BANKS = {torch.complex64: 4, torch.complex128: 3}  # 2^4 amplitudes fill the banks of shared memory
SHARES = 512  # angles of a sweep whose gradients are added up in shared memory; of more, in global memory
_RESERVED = 1024  # bytes of shared memory that the driver may take
_REALS = {torch.complex64: (torch.float32, "float"), torch.complex128: (torch.float64, "double")}


@cache
def kernel_of(file: str, name: str, dtype: torch.dtype, device: torch.device, wide: bool = True) -> Any:
    """A compiled kernel of a .cu file beside this; shared memory as large as the device gives is allowed.

    `wide`: for indices of more than 32 bits."""
    real = _REALS[dtype][1]
    defined = {name: value for name, value in vars(fields).items() if name.isupper()} | gpu_program.NAMES
    defined |= {
        "THREADS": THREADS,
        "THREAD_BITS": THREADS.bit_length() - 1,
        "BLOCKS": BLOCKS[dtype],
        "BLOCKS_BACK": BLOCKS_BACK[dtype],
        "TOGETHER": TOGETHER[dtype],
        "ONE": f"{fields.ONE}LL",
        f"ONLY_{name}": 1,
    }
    head = [f"#define {key} {value}" for key, value in defined.items()]
    place = "unsigned long long" if wide else "unsigned"
    head += [f"typedef {real} real;", f"typedef {real}2 amplitude;", f"typedef {place} place;"]
    source = "\n".join([*head, files(__package__).joinpath(file).read_text()])
    try:
        kernel = torch.cuda._compile_kernel(source, name)
    except (AttributeError, OSError) as error:
        raise UsageError(
            f"the GPU kernel cannot be compiled here: {error}; kernel='reference' needs no compiler"
        ) from error
    properties: Any = torch.cuda.get_device_properties(device)
    kernel.set_shared_memory_config(properties.shared_memory_per_block_optin)
    return kernel


def real_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of an amplitude."""
    return _REALS[dtype][0]


def fits(operations: Sequence[Operation]) -> bool:
    """Whether every operation fits a tile."""
    return max((len(mixed_wires(part)) for each in operations for part in narrowed(each)), default=0) <= WIDEST


class GpuCompiled:
    """A run of unitary operations on the axes of a state of 2^bits amplitudes on a GPU, compiled once."""

    def __init__(
        self,
        operations: Sequence[Operation],
        bits: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_bits: int | None = None,
    ) -> None:
        if dtype not in ROW_BITS:
            raise UsageError(f"dtype {dtype}: expected torch.complex64 or torch.complex128")
        if device.type != "cuda":
            raise UsageError(f"kernel 'gpu' for a state on {device}: expected device='cuda'")
        require_device(device)
        if not fits(operations):
            raise UsageError(f"the GPU kernel mixes at most {WIDEST} wires in one operation; use kernel='reference'")
        operations = [part for each in operations for part in narrowed(each)]
        self.bits, self.dtype, self._wide = bits, dtype, bits > 32
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        tile = row_bits or ROW_BITS[dtype]
        self.code = assemble_linear(operations, bits, tile, NEAR[dtype], BANKS[dtype], TOGETHER[dtype])
        self.angles = self.code.angles
        self._bound: NDArray[np.float64] | None = None
        self._upload(self.code)

    def __call__(self, local: torch.Tensor, weights: Any = (), features: Any = ()) -> None:
        """Apply the operations to 2^bits amplitudes, in place."""
        self._check(local)
        self._bind(weights, features)
        for number in range(len(self.code.sweeps)):
            args = [local, *self._sweep(number, self._room), *self._program]
            self._launch("forward", 1 << (self.bits - self.code.row_bits), args, self._room, tiles=1)

    def _sweep(self, number: int, room: int) -> list[Any]:
        return [self._sweeps, number, *self._bounds[number], room]

    def _blocks(self, most: dict[torch.dtype, int]) -> int:
        """As many as run at a time; each goes through several tiles."""
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        return min(most[self.dtype] * processors, 1 << (self.code.bits - self.code.row_bits))

    run = __call__

    def reverse(
        self, local: torch.Tensor, costate: torch.Tensor, weights: Any = (), features: Any = ()
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Undo the operations on a state and a co-state, in place; the gradients of weights and of features."""
        self._check(local)
        self._check(costate)
        self._bind(weights, features)
        code = self.code
        blocks = self._blocks(BLOCKS_BACK)
        angles = len(code.angles)
        shares = torch.zeros((blocks * THREADS // 32, angles), dtype=torch.float64, device=self.device)
        for number in reversed(range(len(code.sweeps))):
            here = self._scaling.angles_of[number]
            in_shared = here[1] + here[3] <= SHARES
            room = self._room + (THREADS // 32 * (here[1] + here[3]) * 8 if in_shared else 0)
            room += self._kept[number] * (TOGETHER[self.dtype] + 1) * THREADS * self.dtype.itemsize // 2
            program = [*self._sweep(number, room), *self._program, self._terms, self._slopes, shares, angles]
            args = [local, costate, *program, code.turns, *here, int(in_shared), self._kept[number]]
            self._launch("reverse", blocks, args, room, tiles=2)
        of_angles = shares.sum(dim=0).cpu().numpy() * self._divided**2
        of_weights, of_features = self.angles.gradients(of_angles, np.size(weights), np.size(features))
        return of_weights, of_features

    # ---- inside -------------------------------------------------------------------------------------------------

    def _upload(self, code: Code) -> None:
        """The program's arrays on the GPU."""
        made = GpuProgram(code, TOGETHER[self.dtype], THREADS.bit_length() - 1)
        self._scaling = Scaling(code)
        self._copies, self._kept = made.copies, made.kept
        self._jobs = self._sent(made.jobs, torch.int32)
        self._job_count = len(made.jobs)
        self._sweeps = self._sent(made.sweeps, torch.int32)
        self._bounds = made.sweeps[:, [fields.FIRST, fields.LAST]].tolist()
        self._terms = self._sent(made.terms, torch.int32)
        self._slopes = self._sent(code.term_slopes, torch.float64)
        real = real_of(self.dtype)
        self._phases = torch.empty(2 * max(1, made.phase_entries), dtype=real, device=self.device)
        self._halves = torch.zeros(2 * max(1, code.turns), dtype=real, device=self.device)
        self._turn_slopes = torch.zeros(max(1, code.turns), dtype=real, device=self.device)
        self._passes = Passes(made.ops)
        self._ops = self._sent(made.ops, torch.int32)
        self._scales = torch.ones(max(1, len(code.sweeps)), dtype=real, device=self.device)
        self._room = 4 * ((OP_FIELDS + 1) * made.most_ops + 4) + (
            made.slots * self.dtype.itemsize << TOGETHER[self.dtype]
        )
        self._program = [
            made.slots,
            self._ops,
            self._sent(made.rows, torch.int32),
            self._sent(made.pairs, torch.int64),
            self._sent(code.places >> 1, torch.int64 if self._wide else torch.int32),  # of amplitudes, not parts
            self._phases,
            self._sent(made.matrices, real),
            self._halves,
            self._turn_slopes,
            self._scales,
        ]

    def _sent(self, array: NDArray, dtype: torch.dtype) -> torch.Tensor:
        flat = np.append(array.reshape(-1), np.zeros(1, array.dtype))  # never empty: kernels take its address
        return torch.from_numpy(flat).to(self.device, dtype)

    def _bind(self, weights: Any, features: Any) -> None:
        given = [np.asarray(values, dtype=np.float64).reshape(-1) for values in (weights, features)]
        angles = self.angles.values(*given)
        if self._bound is not None and np.array_equal(self._bound, angles):
            return
        code = self.code
        turns = angles[: code.turns] / 2
        cosine, sine = np.cos(turns), np.sin(turns)
        swapped = self._scaling.swapped(cosine, sine)
        divisor = np.where(swapped, -sine, cosine)
        halves = np.stack([cosine, sine], axis=-1).reshape(-1)
        self._halves[: len(halves)].copy_(torch.from_numpy(halves))
        slopes = np.where(swapped, cosine, sine) / np.where(swapped, sine, np.where(cosine == 0, 1.0, cosine))
        self._turn_slopes[: code.turns].copy_(torch.from_numpy(slopes))
        bits = self._passes.bits(swapped)
        self._ops[: OP_FIELDS * len(bits)].view(-1, OP_FIELDS)[:, SWAPPED].copy_(torch.from_numpy(bits))
        scales, self._divided = self._scaling.factors(divisor, self._copies)
        self._scales[: len(scales)].copy_(torch.from_numpy(scales))
        if self._job_count:
            tables = self._sent(code.tables(angles), torch.float64)
            self._launch("bind", self._job_count, [self._jobs, self._terms, tables, self._phases])
        self._bound = angles

    def _launch(self, name: str, blocks: int, args: list[Any], room: int = 0, tiles: int = 0) -> None:
        """With `room` bytes of shared memory, and some tiles after those, at a multiple of half of a tile."""
        with torch.cuda.device(self.device):
            half = self.dtype.itemsize * THREADS << TOGETHER[self.dtype] - 1
            before = -(-(_RESERVED + room) // half)
            kernel = kernel_of("tiles.cu", name, self.dtype, self.device, self._wide)
            shared = (before + 2 * tiles) * half if tiles else 0
            kernel(grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=args, shared_mem=shared)

    def _check(self, local: torch.Tensor) -> None:
        if local.shape != (1 << self.bits,) or local.dtype != self.dtype or local.device != self.device:
            raise UsageError(
                f"amplitudes {local.dtype} {tuple(local.shape)} on {local.device}: "
                f"expected {self.dtype} ({1 << self.bits},) on {self.device}"
            )
        if not local.is_contiguous():
            raise UsageError("amplitudes with gaps between them: expected a contiguous tensor")
