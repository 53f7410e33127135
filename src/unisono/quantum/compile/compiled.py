"""Operations on one array of amplitudes, compiled once and run many times with other angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.errors import MissingPackageError, UsageError
from unisono.quantum.circuit.commutation import mixed_wires
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.operations import Operations
from unisono.quantum.compile.assembly import Assembler, Code
from unisono.quantum.compile.bound import Bound
from unisono.quantum.compile.frame import TileLayout
from unisono.quantum.compile.linear_sweeps import linear_sweeps
from unisono.quantum.compile.lowering import lower
from unisono.quantum.compile.packed import Packed
from unisono.quantum.kernels.workspace import Workspace, workspace
from unisono.quantum.schedule.step import Tile
from unisono.quantum.schedule.sweeps import tiles

LANE_BITS = {torch.complex64: 3, torch.complex128: 2}
NEAR = 3  # bits above the lanes that every tile has: 2^3 cache lines are adjacent
ROW_BITS = 12  # of a tile: 2^11 rows of 64 bytes, two of them for gradients, fit a core's second-level cache
_ROOM = 1 << 18  # bytes of numbers after which a batch ends
_PARTS = {torch.complex64: np.float32, torch.complex128: np.float64}


def assemble(
    operations: Sequence[Operation],
    bits: int,
    lane_bits: int,
    row_bits: int = ROW_BITS,
    *,
    room: int | None = None,
) -> Code:
    """The program of operations on axes 0 (most significant) to bits - 1; the rest is as for Assembler."""
    swept, capacity, near = sweeps(operations, bits, lane_bits, row_bits)
    assembler = Assembler(bits, lane_bits, capacity, room=room, halved=True)
    for tile in swept:
        layout = layout_of(tile, bits, lane_bits, near, capacity)
        assembler.sweep((primitive for each in tile.operations for primitive in lower(each)), layout)
    return assembler.code()


def assemble_linear(
    operations: Sequence[Operation], bits: int, row_bits: int, near: int, banks: int, together: int
) -> Code:
    """The same for a GPU: rows of one amplitude, and tiles that are cosets of linear subspaces."""
    widest = max((len(mixed_wires(each)) for each in operations), default=0)
    capacity = min(max(row_bits, widest), bits)
    near = max(0, min(near, capacity - max(1, widest)))
    assembler = Assembler(bits, 0, capacity, halved=False, together=together, banks=banks)
    for swept in linear_sweeps(operations, bits, capacity, near, banks):
        assembler.linear_sweep(swept)
    return assembler.code()


def sweeps(
    operations: Sequence[Operation], bits: int, lane_bits: int, row_bits: int = ROW_BITS, near: int = NEAR
) -> tuple[list[Tile], int, int]:
    """A tile for each sweep; how many bits its rows have, and how many of those are near."""
    widest = max((len(mixed_wires(each)) for each in operations), default=0)
    low = frozenset(range(bits - lane_bits, bits))
    capacity = min(max(row_bits, widest + lane_bits), bits - lane_bits)
    near = max(0, min(near, capacity - widest - lane_bits))
    always = frozenset(range(bits - lane_bits - near, bits - lane_bits))
    return tiles(operations, capacity - near, low, always), capacity, near


def sweep_count(operations: Sequence[Operation], bits: int, dtype: torch.dtype) -> int:
    """How often a run of operations goes over the memory of its state."""
    narrow, padding = _ready(operations, bits, dtype)
    return len(sweeps(narrow, bits + padding, LANE_BITS[dtype])[0])


def _ready(operations: Sequence[Operation], bits: int, dtype: torch.dtype) -> tuple[Operations, int]:
    """What is too wide taken apart, and how many idle bits a state too small for lanes gets."""
    lane_bits = LANE_BITS[dtype]
    narrow = Operations(part for each in operations for part in narrowed(each))
    widest = max((len(mixed_wires(each)) for each in narrow), default=0)
    return narrow, lane_bits if bits - lane_bits < max(4, min(bits, widest + lane_bits)) else 0


def layout_of(tile: Tile, bits: int, lane_bits: int, near: int, capacity: int) -> TileLayout:
    """Lanes are the lowest bits where the tile leaves those alone; else bits that no operation uses to decide."""
    active = {bits - 1 - axis for axis in tile.active} | set(range(lane_bits, lane_bits + near))
    deciding = {bits - 1 - axis for each in tile.operations if not each.is_diagonal for axis, _ in each.controls}
    low = set(range(lane_bits))
    straight = not low & active and (not low & deciding or len(low | active) > capacity)
    rows = set(active) if straight else active | low
    if straight:
        lanes = sorted(low)
    else:
        idle = sorted(set(range(bits)) - rows, key=lambda bit: (bit in deciding, bit))
        lanes = sorted(idle[:lane_bits])
    spare = sorted(set(range(bits)) - rows - set(lanes))
    rows |= set(spare[: capacity - len(rows)])
    outside = sorted(set(range(bits)) - rows - set(lanes))
    return TileLayout(tuple(sorted(rows)), tuple(lanes), tuple(outside))


class Compiled:
    """A run of unitary operations on the axes of a state of 2^bits amplitudes.

    A small state is padded with idle lanes: its amplitudes stand 2^lane_bits apart."""

    def __init__(
        self, operations: Sequence[Operation], bits: int, dtype: torch.dtype, *, row_bits: int = ROW_BITS
    ) -> None:
        if dtype not in LANE_BITS:
            raise UsageError(f"dtype {dtype}: expected torch.complex64 or torch.complex128")
        try:
            import numba  # noqa: F401
        except ImportError as error:
            raise MissingPackageError("numba", "the CPU kernel for circuits", "quantum") from error
        self.bits, self.dtype, self.part = bits, dtype, _PARTS[dtype]
        operations, self.padding = _ready(operations, bits, dtype)
        room = _ROOM // np.dtype(self.part).itemsize
        self._packed = Packed(assemble(operations, bits + self.padding, LANE_BITS[dtype], row_bits, room=room))
        with workspace() as space:  # unpacked while there is no state yet: that takes memory for a moment
            self._bound(space)

    @property
    def code(self) -> Code:
        """The program, unpacked for who wants to look at it."""
        return self._packed.unpack()

    @property
    def nbytes(self) -> int:
        """What it keeps between runs."""
        return self._packed.nbytes

    def _bound(self, space: Workspace) -> Bound:
        """The program in a workspace, where it may be already."""
        if not isinstance(space.holds, Bound) or space.holds.key is not self._packed.key:
            space.holds = None  # what it holds goes before this comes
            space.holds = Bound(self._packed, self.part, space)
        return space.holds

    def _turned(self, space: Workspace, weights: Any, features: Any) -> Bound:
        """With these numbers for its angles."""
        bound = self._bound(space)
        bound.set_angles(
            *[np.require(values, np.float64, ["C", "A", "W"]).reshape(-1) for values in (weights, features)]
        )
        return bound

    def __call__(self, local: torch.Tensor, weights: Any = (), features: Any = ()) -> None:
        """Apply the operations to 2^bits amplitudes, in place."""
        state = self._parts(local)
        with workspace() as space:
            self._turned(space, weights, features).run(state)
        self._put(local, state)

    run = __call__

    def reverse(
        self, local: torch.Tensor, costate: torch.Tensor, weights: Any = (), features: Any = ()
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Undo the operations on a state and a co-state, in place; the gradients of weights and of features."""
        state, other = self._parts(local), self._parts(costate)
        with workspace() as space:
            bound = self._turned(space, weights, features)
            of_angles = bound.reverse(state, other)
            found = bound.code.angles.gradients(of_angles, np.size(weights), np.size(features))
        self._put(local, state)
        self._put(costate, other)
        return found

    def _parts(self, local: torch.Tensor) -> NDArray:
        """The amplitudes as a flat array of their parts, padded where the program wants it."""
        if local.shape != (1 << self.bits,) or local.dtype != self.dtype or local.device.type != "cpu":
            raise UsageError(
                f"amplitudes {local.dtype} {tuple(local.shape)} on {local.device}: "
                f"expected {self.dtype} ({1 << self.bits},) on cpu"
            )
        if not self.padding:
            return torch.view_as_real(local).view(-1).numpy()
        padded = local.new_zeros((1 << self.bits, 1 << self.padding))
        padded[:, 0] = local
        return torch.view_as_real(padded).view(-1).numpy()

    def _put(self, local: torch.Tensor, state: NDArray) -> None:
        if self.padding:
            padded = torch.view_as_complex(torch.from_numpy(state).view(-1, 2))
            local.copy_(padded.view(1 << self.bits, -1)[:, 0])


_WIDEST_WORD = 6  # X and Y of a Pauli rotation; a wider one is taken apart


def narrowed(operation: Operation) -> Sequence[Operation]:
    return operation.lowered() if len(mixed_wires(operation)) > _WIDEST_WORD else (operation,)
