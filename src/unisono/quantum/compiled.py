"""Operations on one array of amplitudes, compiled once and run many times with other angles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.errors import MissingPackageError, UsageError
from unisono.quantum.assembly import Assembler, Batch, Code
from unisono.quantum.commutation import mixed_wires
from unisono.quantum.frame import SKEW, Layout
from unisono.quantum.kernels.threads import count, together
from unisono.quantum.kernels.workspace import Workspace, workspace
from unisono.quantum.lowering import lower
from unisono.quantum.operation import Operation
from unisono.quantum.schedule import tiles
from unisono.quantum.step import Tile

LANE_BITS = {torch.complex64: 3, torch.complex128: 2}
NEAR = 3  # bits above the lanes that every tile has: 2^3 cache lines lie side by side
ROW_BITS = 12  # of a tile: 2^11 rows of 64 bytes, two of them for gradients, fit a core's second-level cache
_ROOM = 1 << 18  # bytes of numbers after which a batch ends
_numbers = itertools.count()  # of bound programs
_PARTS = {torch.complex64: np.float32, torch.complex128: np.float64}


class Angles:
    """Affine angles of weights and features, evaluated and differentiated all at once."""

    def __init__(self, angles: Sequence[Any]) -> None:
        self.constants = np.array([angle.constant for angle in angles], dtype=np.float64)
        self._terms = []
        for kind in ("weights", "features"):
            found = [(i, index, factor) for i, angle in enumerate(angles) for index, factor in getattr(angle, kind)]
            at, indices, factors = zip(*found, strict=True) if found else ((), (), ())
            self._terms.append((np.array(at, np.int64), np.array(indices, np.int64), np.array(factors, np.float64)))

    def values(self, weights: NDArray, features: NDArray) -> NDArray[np.float64]:
        total = self.constants.copy()
        for (at, indices, factors), given in zip(self._terms, (weights, features), strict=True):
            if len(at):
                total += np.bincount(at, factors * given[indices], minlength=len(total))
        return total

    def gradients(self, of_angles: NDArray[np.float64], weights: int, features: int) -> list[NDArray]:
        """Gradients of weights and of features from those of the angles."""
        return [
            np.bincount(indices, factors * of_angles[at], minlength=size) if len(at) else np.zeros(size)
            for (at, indices, factors), size in zip(self._terms, (weights, features), strict=True)
        ]


def assemble(
    operations: Sequence[Operation],
    bits: int,
    lane_bits: int,
    row_bits: int = ROW_BITS,
    *,
    near: int = NEAR,
    skew: int = SKEW,
    room: int | None = None,
    halved: bool = True,
) -> Code:
    """The program of operations on axes 0 (most significant) to bits - 1; the rest is as Assembler says."""
    swept, capacity, near = sweeps(operations, bits, lane_bits, row_bits, near)
    assembler = Assembler(bits, lane_bits, capacity, skew, room=room, halved=halved)
    for tile in swept:
        layout = replace(layout_of(tile, bits, lane_bits, near, capacity), skew=skew)
        assembler.sweep((primitive for each in tile.operations for primitive in lower(each)), layout)
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


def _ready(operations: Sequence[Operation], bits: int, dtype: torch.dtype) -> tuple[list[Operation], int]:
    """What is too wide taken apart, and how many idle bits a state too small for lanes gets."""
    lane_bits = LANE_BITS[dtype]
    narrow = [part for each in operations for part in narrowed(each)]
    widest = max((len(mixed_wires(each)) for each in narrow), default=0)
    return narrow, lane_bits if bits - lane_bits < max(4, min(bits, widest + lane_bits)) else 0


def layout_of(tile: Tile, bits: int, lane_bits: int, near: int, capacity: int) -> Layout:
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
    return Layout(tuple(sorted(rows)), tuple(lanes), tuple(outside))


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
        self.code = assemble(operations, bits + self.padding, LANE_BITS[dtype], row_bits, room=room)
        self.angles = Angles(self.code.angles)
        self._last: Bound | None = None  # a gradient comes with the angles of the run before

    def bind(self, weights: Any = (), features: Any = ()) -> Bound:
        """The program with these numbers as angles."""
        given = [np.asarray(values, dtype=np.float64).reshape(-1) for values in (weights, features)]
        angles = self.angles.values(*given)
        if self._last is None or not np.array_equal(self._last.angles, angles):
            self._last = None  # its numbers go before others come
            self._last = Bound(self.code, self.part, angles)
        return self._last

    def __call__(self, local: torch.Tensor, weights: Any = (), features: Any = ()) -> None:
        """Apply the operations to 2^bits amplitudes, in place."""
        state = self._parts(local)
        self.bind(weights, features).run(state)
        self._put(local, state)

    run = __call__

    def reverse(
        self, local: torch.Tensor, costate: torch.Tensor, weights: Any = (), features: Any = ()
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Undo the operations on a state and a co-state, in place; the gradients of weights and of features."""
        state, other = self._parts(local), self._parts(costate)
        of_angles = self.bind(weights, features).reverse(state, other)
        self._put(local, state)
        self._put(costate, other)
        of_weights, of_features = self.angles.gradients(of_angles, np.size(weights), np.size(features))
        return of_weights, of_features

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


class Bound:
    """A program with its angles filled in, a batch of sweeps at a time."""

    def __init__(self, code: Code, part: Any, angles: NDArray[np.float64]) -> None:
        self.code, self.part, self.angles = code, part, angles
        self.ops = code.ops.copy()
        self.scales = np.ones(len(code.sweeps))
        self._tables = with_angles(code, angles)
        self._number = next(_numbers)

    def run(self, state: NDArray) -> None:
        """On the parts of a state's amplitudes, in place."""
        with workspace() as space:
            self._run(state, space)

    def reverse(self, state: NDArray, other: NDArray) -> NDArray[np.float64]:
        """Undo the operations on a state and its co-state, in place; the gradient of each angle."""
        with workspace() as space:
            return self._reverse(state, other, space)

    def _run(self, state: NDArray, space: Workspace) -> None:
        from unisono.quantum.kernels.cpu import forward

        code = self.code
        threads = self._threads()
        rooms = [self._rooms(space, thread, tiles=1) for thread in range(threads)]
        for batch in code.batches:
            values = self._filled(batch, space)
            sweeps, scales = code.sweeps[batch.sweeps], self.scales[batch.sweeps].astype(state.dtype)
            counters = np.zeros(2 * len(sweeps), dtype=np.int64)

            program = (sweeps, self.ops, code.rows, code.pairs, code.places, values, scales)

            def call(number: int, program: Any = program, counters: Any = counters) -> None:
                forward(state, *program, *rooms[number], counters, threads)

            together(call, threads)

    def _reverse(self, state: NDArray, other: NDArray, space: Workspace) -> NDArray[np.float64]:
        from unisono.quantum.kernels.bind import phase_gradients
        from unisono.quantum.kernels.cpu_reverse import reverse

        code = self.code
        turns = self.angles[: code.turns] / 2
        halves = np.append(np.stack([np.cos(turns), np.sin(turns)], axis=-1), [1.0]).astype(state.dtype)
        threads = self._threads()
        gradients = np.zeros((threads, code.turns + 1))
        rooms = [self._rooms(space, thread, tiles=2) for thread in range(threads)]
        of_angles = np.zeros(len(self.angles))
        of_terms = of_angles[code.turns :]
        for batch in reversed(code.batches):
            values = self._filled(batch, space)
            sweeps = code.sweeps[batch.sweeps]
            counters = np.zeros(2 * len(sweeps), dtype=np.int64)
            sums = np.zeros((threads, batch.sums + 1))

            program = (sweeps, code.ops, code.rows, code.pairs, code.places, values, halves)

            def call(number: int, program: Any = program, sums: Any = sums, counters: Any = counters) -> None:
                reverse(state, other, *program, *rooms[number], gradients[number], sums[number], counters, threads)

            together(call, threads)
            sums[0] += sums[1:].sum(axis=0)
            width = 1 << code.lane_bits
            phase_gradients(code.ops[batch.ops], code.terms, code.term_slopes, sums[0], width, of_terms)
        of_angles[: code.turns] = gradients.sum(axis=0)[:-1]
        return of_angles

    def _filled(self, batch: Batch, space: Workspace) -> NDArray:
        """The numbers of this batch; its instructions begin as they were assembled."""
        from unisono.quantum.kernels.bind import bind

        code, part = self.code, self.part
        values = space.values(max(each.values for each in code.batches) + 1, part)
        if space.holds == (self._number, batch.sweeps.start):
            return values
        space.holds = None
        self.ops[batch.ops] = code.ops[batch.ops]
        for begin, numbers in batch.constants:
            values[begin : begin + len(numbers)] = numbers
        sweeps, scales = code.sweeps[batch.sweeps], self.scales[batch.sweeps]
        scratch = space.tile(0, 1 << (code.row_bits + code.lane_bits), np.float64)  # no tile is in it yet
        bind(sweeps, self.ops, code.terms, self._tables, self.angles, values, scales, 1 << code.lane_bits, scratch)
        space.holds = (self._number, batch.sweeps.start)
        return values

    def _threads(self) -> int:
        code = self.code
        tiles = 1 << (code.bits - code.lane_bits - code.row_bits)
        return min(count(), tiles)

    def _rooms(self, space: Workspace, thread: int, tiles: int) -> tuple[NDArray, ...]:
        """A thread's tiles, and its scratch for dense matrices."""
        code, part = self.code, self.part
        tile = 2 << (code.row_bits + code.lane_bits)
        return (
            *(space.tile(thread, tile, part, number) for number in range(tiles)),
            space.tile(thread, 2 * code.spare, part, number=2),
        )


def with_angles(code: Code, angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """The tables of the phases' terms."""
    return code.term_constants + code.term_slopes * np.append(angles[code.turns :], 0.0)[code.term_angles]


_WIDEST_WORD = 6  # X and Y of a Pauli rotation; a wider one is taken apart


def narrowed(operation: Operation) -> Sequence[Operation]:
    return operation.lowered() if len(mixed_wires(operation)) > _WIDEST_WORD else (operation,)
