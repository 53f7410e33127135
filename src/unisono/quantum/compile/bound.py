"""A program in a workspace, its angles filled in a batch of sweeps at a time: what the CPU kernels run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.quantum.compile.assembly import Batch
from unisono.quantum.compile.packed import Form, Packed
from unisono.quantum.kernels.workspace import Workspace, count, together


class Bound:
    """All its arrays are in the workspace: those of the program, what comes with angles, the numbers of one batch.

    It knows the program by its `key` only: what is kept for a circuit goes with the circuit."""

    def __init__(self, packed: Packed, part: Any, space: Workspace) -> None:
        self.key, self.part, self._space = packed.key, part, space
        values = 1 + max((batch.values for batch in packed.frame.batches), default=0)
        angles = packed.shape("angles")[0] + 1
        mine: list[Form] = [((values,), part), (packed.shape("ops"), np.int64)]
        mine += [((size,), np.float64) for size in (packed.shape("sweeps")[0], angles, angles)]
        mine += [(packed.shape("term_angles"), np.float64)]
        arrays = space.arrays([*mine, *packed.forms])
        self._values, self._ops, self._scales, self.angles, self._wanted, self._tables = arrays[: len(mine)]
        self.code = packed.unpack(arrays[len(mine) :])
        self.angles[:] = np.nan  # no angles yet
        self._wanted[-1] = 0.0  # for phases that have none
        self._batch: Batch | None = None  # whose numbers are there

    def set_angles(self, weights: NDArray, features: NDArray) -> None:
        """Take these angles; a gradient comes with those of the run before, and finds its numbers still there."""
        from unisono.quantum.kernels.bind import evaluate

        known = self.code.angles
        for what, terms, given in (("weights", known.weights, weights), ("features", known.features, features)):
            if (needed := int(terms.indices.max(initial=-1)) + 1) > len(given):  # kernels look at no bounds
                raise UsageError(f"the operations read {needed} {what}, but {len(given)} were given")
        evaluate(known.constants, *known.weights, weights, *known.features, features, self._wanted)
        if not np.array_equal(self._wanted, self.angles):
            self._batch = None
            self.angles[:] = self._wanted
            self.code.tables(self.angles, out=self._tables)

    def run(self, state: NDArray) -> None:
        """On the parts of a state's amplitudes, in place."""
        from unisono.quantum.kernels.cpu import forward

        code = self.code
        threads = self._threads()
        rooms = [self._rooms(thread, tiles=1) for thread in range(threads)]
        for batch in code.batches:
            self._fill(batch)
            sweeps, scales = code.sweeps[batch.sweeps], self._scales[batch.sweeps].astype(state.dtype)
            counters = np.zeros(2 * len(sweeps), dtype=np.int64)

            program = (sweeps, self._ops, code.rows, code.pairs, code.places, self._values, scales)

            def call(number: int, program: Any = program, counters: Any = counters) -> None:
                forward(state, *program, *rooms[number], counters, threads)

            together(call, threads)

    def reverse(self, state: NDArray, other: NDArray) -> NDArray[np.float64]:
        """Undo the operations on a state and its co-state, in place; the gradient of each angle."""
        from unisono.quantum.kernels.bind import phase_gradients
        from unisono.quantum.kernels.cpu_reverse import reverse

        code = self.code
        turns = self.angles[: code.turns] / 2
        halves = np.append(np.stack([np.cos(turns), np.sin(turns)], axis=-1), [1.0]).astype(state.dtype)
        threads = self._threads()
        gradients = np.zeros((threads, code.turns + 1))
        rooms = [self._rooms(thread, tiles=2) for thread in range(threads)]
        of_angles = np.zeros(len(code.angles))
        of_terms = of_angles[code.turns :]
        for batch in reversed(code.batches):
            self._fill(batch)
            sweeps = code.sweeps[batch.sweeps]
            counters = np.zeros(2 * len(sweeps), dtype=np.int64)
            sums = np.zeros((threads, batch.sums + 1))

            program = (sweeps, code.ops, code.rows, code.pairs, code.places, self._values, halves)

            def call(number: int, program: Any = program, sums: Any = sums, counters: Any = counters) -> None:
                reverse(state, other, *program, *rooms[number], gradients[number], sums[number], counters, threads)

            together(call, threads)
            sums[0] += sums[1:].sum(axis=0)
            width = 1 << code.lane_bits
            phase_gradients(code.ops[batch.ops], code.terms, code.term_slopes, sums[0], width, of_terms)
        of_angles[: code.turns] = gradients.sum(axis=0)[:-1]
        return of_angles

    def _fill(self, batch: Batch) -> None:
        """Its numbers, and its instructions as the angles want them."""
        from unisono.quantum.kernels.bind import bind

        if self._batch is batch:
            return
        code, values = self.code, self._values
        self._batch = None
        self._ops[batch.ops] = code.ops[batch.ops]
        for begin, at, size in code.constant_places[batch.constants].tolist():
            values[begin : begin + size] = code.constants[at : at + size]
        sweeps, scales = code.sweeps[batch.sweeps], self._scales[batch.sweeps]
        tile = 1 << (code.row_bits + code.lane_bits)
        scratch = self._space.tile(0, tile, np.float64)  # no tile is in it yet
        bind(sweeps, self._ops, code.terms, self._tables, self.angles, values, scales, 1 << code.lane_bits, scratch)
        self._batch = batch

    def _threads(self) -> int:
        code = self.code
        tiles = 1 << (code.bits - code.lane_bits - code.row_bits)
        return min(count(), tiles)

    def _rooms(self, thread: int, tiles: int) -> tuple[NDArray, ...]:
        """A thread's tiles, and its scratch for dense matrices."""
        code, part = self.code, self.part
        tile = 2 << (code.row_bits + code.lane_bits)
        return (
            *(self._space.tile(thread, tile, part, number) for number in range(tiles)),
            self._space.tile(thread, 2 * code.spare, part, number=2),
        )
