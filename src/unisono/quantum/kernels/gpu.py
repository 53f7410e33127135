"""The GPU kernel: the CPU kernel's programs in tiles of shared memory, in place, compiled at run time through torch.

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
from unisono.quantum.compile.compiled import assemble, narrowed
from unisono.quantum.kernels import code as fields

THREADS = 256  # of a block
BLOCKS = {torch.complex64: 4, torch.complex128: 3}  # that a multiprocessor has at a time: as registers allow
BLOCKS_BACK = {torch.complex64: 3, torch.complex128: 2}  # for gradients
WIDEST = 11  # wires of a matrix: a block has 2^11 new amplitudes in registers
ROW_BITS = {torch.complex64: 12, torch.complex128: 11}  # 32 KiB a tile; two of them for gradients
NEAR = {torch.complex64: 4, torch.complex128: 3}  # low bits that every tile has: 128 bytes are adjacent
EACH = {torch.complex64: 16, torch.complex128: 8}  # amplitudes of a tile that a thread has in registers
SKEW = {torch.complex64: 4, torch.complex128: 3}  # 2^4 amplitudes fill the banks of shared memory
_REALS = {torch.complex64: (torch.float32, "float"), torch.complex128: (torch.float64, "double")}


@cache
def kernel_of(file: str, name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A compiled kernel of a .cu file beside this; shared memory as large as the device gives is allowed."""
    real = _REALS[dtype][1]
    defined = {name: value for name, value in vars(fields).items() if name.isupper()}
    defined |= {
        "THREADS": THREADS,
        "BLOCKS": BLOCKS[dtype],
        "BLOCKS_BACK": BLOCKS_BACK[dtype],
        "ONE": f"{fields.ONE}LL",
        "EACH": EACH[dtype],
    }
    head = [f"#define {key} {value}" for key, value in defined.items()]
    head += [f"typedef {real} real;", f"typedef {real}2 amplitude;"]
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
        self.bits, self.dtype = bits, dtype
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        tile = row_bits or ROW_BITS[dtype]
        self.code = assemble(operations, bits, 0, tile, near=NEAR[dtype], skew=SKEW[dtype], halved=False)
        self.angles = self.code.angles
        self._bound: NDArray[np.float64] | None = None
        self._upload(self.code)

    def __call__(self, local: torch.Tensor, weights: Any = (), features: Any = ()) -> None:
        """Apply the operations to 2^bits amplitudes, in place."""
        self._check(local)
        self._bind(weights, features)
        code = self.code
        for number in range(len(code.sweeps)):
            tiles = 1 << int(code.sweeps[number, fields.OUTSIDE_BITS])
            self._launch("forward", tiles, [local, self._sweeps, number, *self._program], tiles_held=1)

    run = __call__

    def reverse(
        self, local: torch.Tensor, costate: torch.Tensor, weights: Any = (), features: Any = ()
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Undo the operations on a state and a co-state, in place; the gradients of weights and of features."""
        self._check(local)
        self._check(costate)
        self._bind(weights, features)
        code = self.code
        most = BLOCKS_BACK[self.dtype] * torch.cuda.get_device_properties(self.device).multi_processor_count
        tiles = 1 << (code.bits - code.row_bits)
        blocks = min(most, tiles)
        angles = len(code.angles)
        shares = torch.zeros((blocks * THREADS // 32, angles), dtype=torch.float64, device=self.device)
        for number in reversed(range(len(code.sweeps))):
            program = [self._sweeps, number, *self._program, self._terms, self._slopes, shares, angles, code.turns]
            self._launch("reverse", blocks, [local, costate, *program], tiles_held=2)
        of_angles = shares.sum(dim=0).cpu().numpy()
        of_weights, of_features = self.angles.gradients(of_angles, np.size(weights), np.size(features))
        return of_weights, of_features

    # ---- inside -------------------------------------------------------------------------------------------------

    def _upload(self, code: Code) -> None:
        """The program's arrays on the GPU; phases and matrices get arrays of their own, in whole amplitudes."""
        ops = code.ops.astype(np.int32)
        matrices: list[NDArray] = []
        constants = {begin: code.constants[at : at + size] for begin, at, size in code.constant_places.tolist()}
        phases = entries = 0
        for op in ops:
            if op[fields.KIND] == fields.PHASE:
                op[fields.VALUES], phases = phases, phases + int(op[fields.ROW_COUNT])
            elif op[fields.KIND] == fields.DENSE:
                size = 1 << 2 * int(op[fields.COUNT])
                matrices.append(constants[int(op[fields.VALUES])][1:])  # after the weight of the one lane
                op[fields.VALUES], entries = entries, entries + size
        which = np.flatnonzero(ops[:, fields.KIND] == fields.PHASE).astype(np.int32)
        self._phase_count = len(which)
        self._which = self._sent(which, torch.int32)
        self._sweeps = self._sent(code.sweeps, torch.int32)
        self._terms = self._sent(code.terms, torch.int32)
        self._slopes = self._sent(code.term_slopes, torch.float64)
        real = real_of(self.dtype)
        self._phases = torch.empty(2 * max(1, phases), dtype=real, device=self.device)
        self._halves = torch.zeros(2 * max(1, code.turns), dtype=real, device=self.device)
        self._program = [
            self._sent(ops, torch.int32),
            self._sent(code.rows, torch.int32),
            self._sent(code.pairs, torch.int64),
            self._sent(code.places >> 1, torch.int64),  # of amplitudes, not of their parts
            self._phases,
            self._sent(np.concatenate([*matrices, np.zeros(2)]), real),
            self._halves,
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
        halves = np.stack([np.cos(turns), np.sin(turns)], axis=-1).reshape(-1)
        self._halves[: len(halves)].copy_(torch.from_numpy(halves))
        if self._phase_count:
            tables = self._sent(code.tables(angles), torch.float64)
            ops = self._program[0]
            self._launch("bind", self._phase_count, [ops, self._which, self._terms, tables, self._phases], tiles_held=0)
        self._bound = angles

    def _launch(self, name: str, blocks: int, args: list[Any], tiles_held: int) -> None:
        with torch.cuda.device(self.device):
            room = tiles_held * self.dtype.itemsize << self.code.row_bits
            kernel = kernel_of("tiles.cu", name, self.dtype, self.device)
            kernel(grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=args, shared_mem=room)

    def _check(self, local: torch.Tensor) -> None:
        if local.shape != (1 << self.bits,) or local.dtype != self.dtype or local.device != self.device:
            raise UsageError(
                f"amplitudes {local.dtype} {tuple(local.shape)} on {local.device}: "
                f"expected {self.dtype} ({1 << self.bits},) on {self.device}"
            )
        if not local.is_contiguous():
            raise UsageError("amplitudes with gaps between them: expected a contiguous tensor")
