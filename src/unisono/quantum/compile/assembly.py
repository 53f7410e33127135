"""From tiles to arrays of instructions (kernels/code.py), made once for a circuit; angles come with each run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.circuit.growable import ChunkedList, Numbers
from unisono.quantum.circuit.parameter import Affine
from unisono.quantum.compile.angles import Angles
from unisono.quantum.compile.frame import SKEW, Basis, TileLayout, skew
from unisono.quantum.compile.linear_sweeps import LinearSweep
from unisono.quantum.compile.lowering import Primitive
from unisono.quantum.compile.stages import CompiledStage, Mix, Term, stages
from unisono.quantum.kernels import code

TOGETHER = 3  # bits rotated in one pass: 8 rows fill the registers


@dataclass(frozen=True)
class Batch:
    """Consecutive sweeps whose numbers are in memory together: `values` of them, and `sums` over rows for gradients.

    `constants` are those that do not depend on angles."""

    sweeps: slice
    ops: slice
    values: int
    sums: int
    constants: slice  # of `constant_places`


@dataclass(frozen=True)
class Code:
    """A program for a state of 2^bits amplitudes with rows of 2^lane_bits.

    Angle i is that of rotation i, for i < turns, and of phase term i - turns after that. `terms` are records of
    the phases, as kernels/bind.py reads them. Places among values and sums are those of the batch."""

    bits: int
    lane_bits: int
    row_bits: int
    sweeps: NDArray[np.int64]
    ops: NDArray[np.int64]
    rows: NDArray[np.int32]
    pairs: NDArray[np.int64]
    places: NDArray[np.int64]
    angles: Angles
    turns: int
    batches: tuple[Batch, ...]
    constants: NDArray[np.float64]  # one after the other
    constant_places: NDArray[np.int64]  # of each: where it begins among the values, and among `constants`, and its size
    terms: NDArray[np.int64]
    term_constants: NDArray[np.float64]
    term_slopes: NDArray[np.float64]
    term_angles: NDArray[np.int64]  # of each entry of the terms' tables: the number of its angle, or -1
    spare: int  # amplitudes of scratch, for dense matrices

    def tables(self, angles: NDArray[np.float64], out: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """The tables of the phases' terms, for values of `angles`."""
        made = np.empty_like(self.term_constants) if out is None else out
        np.take(angles[self.turns :], self.term_angles, out=made, mode="wrap")  # -1: the last, which is 0
        made *= self.term_slopes
        made += self.term_constants
        return made


class Assembler:
    """Collects the arrays of a Code, sweep by sweep; a batch ends when it has `room` values or more.

    `halved`: linear tables are in two parts, as kernels/code.py defines. What is collected goes straight into the
    arrays that the Code will have: lists of numbers, and a copy at the end, would be most of the memory that a circuit
    takes beside its state."""

    def __init__(
        self,
        bits: int,
        lane_bits: int,
        row_bits: int,
        every: int = SKEW,
        *,
        room: int | None = None,
        halved: bool,
        together: int = TOGETHER,
        banks: int = 0,
    ) -> None:
        self.bits, self.lane_bits = bits, lane_bits
        self._room, self._halved, self._together, self._banks = room, halved, together, banks
        self.width = 1 << lane_bits
        self._ops, self._sweeps, self._pairs = (Numbers(np.int64) for _ in range(3))
        self._sweep_ops: list[list[int]] = []  # of the sweep that is being made
        self._rows, self._places = Numbers(np.int32), Numbers(np.int64)
        self._constants, self._constant_places = Numbers(np.float64), Numbers(np.int64)
        self._batches: list[Batch] = []
        self._known: dict[tuple[object, ...], tuple[int, int]] = {}
        self._turn_angles: ChunkedList[Affine] = ChunkedList()
        self._term_angles: ChunkedList[Affine] = ChunkedList()
        self._records = Numbers(np.int64)
        self._term_constants, self._term_slopes = Numbers(np.float64), Numbers(np.float64)
        self._term_numbers = Numbers(np.int64)
        self._sizes = {"values": 0, "sums": 0}
        self.row_bits = row_bits
        self._spare = 1
        self._add("rows", self._halves(_xors(skew(row_bits, every)[0])))

    def sweep(self, primitives: Iterable[Primitive], layout: TileLayout) -> None:
        """Add a tile's program, and how the tiles are in the state."""
        made, frame = stages(primitives, layout, self.bits - 1)
        fields = self._begin(made, len(layout.rows), layout.outside)
        key = ("places", *layout.rows)
        fields[code.PLACES], _ = self._once(key, lambda: _xors(2 << bit for bit in layout.rows))
        straight = layout.lanes == tuple(range(self.lane_bits))
        fields[code.LANES] = -1 if straight else self._add("places", _xors(2 << bit for bit in layout.lanes))
        flips = [(frame.parity[bit].outside, frame.mask[bit]) for bit in layout.rows]
        self._finish(fields, [frame.mask[bit] for bit in layout.rows], flips)

    def linear_sweep(self, swept: LinearSweep) -> None:
        """The same for a sweep whose tiles are cosets of a linear subspace; there are no lanes."""
        fields = self._begin(swept.stages, len(swept.basis), swept.outside)
        key = ("places", "linear", *swept.basis)
        fields[code.PLACES], _ = self._once(key, lambda: _xors(2 * vector for vector in swept.basis))
        fields[code.LANES] = -1
        fields[code.START], _ = self._once(("rows", "order", *swept.start), lambda: _xors(swept.start))
        self._finish(fields, swept.order, swept.order_flips)

    def _begin(self, made: Iterable[CompiledStage], row_bits: int, outside: Sequence[int]) -> list[int]:
        fields = [0] * code.SWEEP_FIELDS
        fields[code.FIRST] = len(self._ops) // code.FIELDS
        for stage in made:
            self._stage(stage, row_bits)
        fields[code.LAST] = fields[code.FIRST] + len(self._sweep_ops)
        fields[code.ROW_BITS], fields[code.OUTSIDE_BITS] = row_bits, len(outside)
        fields[code.OUTSIDE] = self._add("places", np.array([2 << bit for bit in outside], dtype=np.int64))
        return fields

    def _finish(self, fields: list[int], order: Sequence[int], flips: Iterable[tuple[int, int]]) -> None:
        """`order` has the row mask of each bit of a place, at the end."""
        fields[code.ORDER], _ = self._once(("rows", "order", *order), lambda: _xors(order))
        real = [(outside, mask) for outside, mask in flips if outside]
        fields[code.SWEEP_FLIPS], fields[code.SWEEP_FLIP_COUNT] = self._add_pairs(real), len(real)
        self._sweeps.extend(fields)
        for op in self._sweep_ops:
            self._ops.extend(op)
        self._sweep_ops.clear()
        if self._room is not None and self._sizes["values"] >= self._room:
            self._end_batch()

    def code(self) -> Code:
        self._end_batch()
        self._rows.append(0)  # never empty: kernels take its address
        self._places.append(0)
        return Code(
            self.bits,
            self.lane_bits,
            self.row_bits,
            self._sweeps.array.reshape(-1, code.SWEEP_FIELDS),
            self._ops.array.reshape(-1, code.FIELDS),
            self._rows.array,
            self._pairs.array.reshape(-1, 2),
            self._places.array,
            Angles.of(chain(self._turn_angles, self._term_angles)),
            len(self._turn_angles),
            tuple(self._batches),
            self._constants.array,
            self._constant_places.array.reshape(-1, 3),
            self._records.array,
            self._term_constants.array,
            self._term_slopes.array,
            self._term_numbers.array,
            self._spare,
        )

    # ---- stages -------------------------------------------------------------------------------------------------

    def _stage(self, stage: CompiledStage, row_bits: int) -> None:
        for level in stage.levels():
            plain = [mix for mix in level if mix.plain]
            for start in range(0, len(plain), self._together):
                self._turns(plain[start : start + self._together], row_bits)
            for mix in level:
                if not mix.plain:
                    self._dense(mix, row_bits) if mix.matrix is not None else self._pair(mix, row_bits)
        if stage.terms:
            self._phases(stage.terms, row_bits)

    def _turns(self, mixes: Sequence[Mix], row_bits: int) -> None:
        op = self._op(code.TURNS, mixes, row_bits)
        op[code.COUNT] = len(mixes)
        for number, mix in enumerate(mixes):
            op[code.MASK0 + number] = mix.masks[0]
        op[code.VALUES] = self._skip("values", 2 * len(mixes))
        op[code.SLOT] = self._turn_slot(mixes)

    def _pair(self, mix: Mix, row_bits: int) -> None:
        """Entries 00, 01, 10, 11 and weights, for each lane; those of a rotation are filled in with its angle."""
        op = self._op(code.PAIR, [mix], row_bits)
        op[code.COUNT], op[code.MASK0] = 1, mix.masks[0]
        weights = self._lane_weights(mix)
        swapped = np.concatenate([1 - weights, weights, weights, 1 - weights, weights])
        op[code.VALUES] = self._constant(swapped)
        op[code.SLOT] = self._turn_slot([mix]) if mix.angle is not None else -1

    def _dense(self, mix: Mix, row_bits: int) -> None:
        size = 1 << len(mix.masks)
        self._add("rows", _xors(reversed(mix.masks)))
        op = self._op(code.DENSE, [mix], row_bits)
        assert mix.matrix is not None
        op[code.COUNT] = len(mix.masks)
        entries = np.stack([mix.matrix.real, mix.matrix.imag], axis=-1).reshape(-1)
        op[code.VALUES] = self._constant(np.concatenate([self._lane_weights(mix), entries]))
        self._spare = max(self._spare, size * self.width)

    def _op(self, kind: int, mixes: Sequence[Mix], row_bits: int) -> list[int]:
        """An instruction on the rows where all bits read 0 and all guards hold, outside bits being 0."""
        op = [0] * code.FIELDS
        self._sweep_ops.append(op)
        op[code.KIND], op[code.SLOT] = kind, -1
        wanted = [(parity.rows, 0) for mix in mixes for parity in mix.bits]
        flips = [(bit.outside, mask) for mix in mixes for bit, mask in zip(mix.bits, mix.masks, strict=True)]
        conditions = []
        for mix in mixes:
            for number, (parity, value) in enumerate(mix.guards):
                if parity.rows:
                    wanted.append((parity.rows, value))
                    flips.append((parity.outside, mix.guard_masks[number]))
                elif not parity.lanes:
                    conditions.append((parity.outside, value))
        key = ("rows", row_bits, *sorted(wanted))
        if kind == code.DENSE:
            key = (*key, len(self._rows))  # its own: masks precede its rows
        op[code.ROWS], op[code.ROW_COUNT] = self._once(key, lambda: _chosen(wanted, row_bits, self._banks))
        self._flips(op, flips, conditions)
        return op

    def _flips(self, op: list[int], flips: Iterable[tuple[int, int]], conditions: Sequence[tuple[int, int]]) -> None:
        real = [(outside, mask) for outside, mask in flips if outside]
        op[code.FLIPS], op[code.FLIP_COUNT] = self._add_pairs(real), len(real)
        op[code.CONDITIONS], op[code.CONDITION_COUNT] = self._add_pairs(conditions), len(conditions)

    def _lane_weights(self, mix: Mix) -> NDArray[np.float64]:
        weights = np.ones(self.width)
        for parity, value in mix.guards:
            if parity.lanes:
                lanes = np.bitwise_count(np.arange(self.width) & parity.lanes) & 1
                weights *= lanes == value
        return weights

    def _turn_slot(self, mixes: Sequence[Mix]) -> int:
        slot = len(self._turn_angles)
        self._turn_angles.extend(mix.angle for mix in mixes if mix.angle is not None)
        return slot

    # ---- phases -------------------------------------------------------------------------------------------------

    def _phases(self, terms: Sequence[Term], row_bits: int) -> None:
        """One instruction for all terms that need no condition on outside bits, and one for each condition."""
        basis = Basis()
        for term in terms:
            for parity in (*(parity for parity, _ in term.guards), *term.bits):
                basis.reduce(parity)
        groups: dict[tuple[tuple[int, int], ...], list[list[int]]] = {}
        lanes: dict[tuple[tuple[int, int], ...], bool] = {}
        for term in terms:
            angle = self._term_angle(term)
            for conditions, record, touches_lanes in self._cases(term, basis, angle):
                groups.setdefault(conditions, []).append(record)
                lanes[conditions] = lanes.get(conditions, False) or touches_lanes
        for conditions, records in groups.items():
            self._phase(conditions, records, lanes[conditions], basis, row_bits)

    def _phase(
        self,
        conditions: tuple[tuple[int, int], ...],
        records: list[list[int]],
        lanes: bool,
        basis: Basis,
        row_bits: int,
    ) -> None:
        op = [0] * code.FIELDS
        self._sweep_ops.append(op)
        op[code.KIND] = code.LANE_PHASE if lanes else code.PHASE
        entries = 1 << (row_bits + (self.lane_bits if lanes else 0))
        op[code.VALUES] = self._skip("values", 2 * entries)
        op[code.ROW_COUNT] = 1 << row_bits
        differentiable = any(record[3] for record in records)
        op[code.SLOT] = self._skip("sums", entries) if differentiable else -1
        self._flips(op, basis.flips, conditions)
        op[code.ROWS], op[code.COUNT] = len(self._records), len(records)
        for record in records:
            self._records.extend(record)

    def _term_angle(self, term: Term) -> tuple[int, int]:
        """Where the term's table begins, and the number of its angle (-1: it has none)."""
        phase = term.phase
        slopes = phase.slopes or (0.0,) * len(phase.constants)
        table = len(self._term_constants)
        self._term_constants.extend(phase.constants)
        self._term_slopes.extend(slopes)
        number = -1
        if any(slopes):
            number = len(self._term_angles)
            self._term_angles.append(phase.angle)
        self._term_numbers.extend([number] * len(phase.constants))
        return table, number

    def _cases(
        self, term: Term, basis: Basis, angle: tuple[int, int]
    ) -> Iterable[tuple[tuple[tuple[int, int], ...], list[int], bool]]:
        """(conditions, record, whether lanes matter) for each value of the outside bits that shifting rows cannot meet.

        A record: its length, table, angle, whether it has a gradient, how many guards, how many bits; for each of these
        the row mask, the lane mask and a flip (of a guard: the value it must have)."""
        parities = [*(parity for parity, _ in term.guards), *term.bits]
        left = [basis.reduce(parity) for parity in parities]
        known = sorted({outside & ~code.ONE for outside in left} - {0})
        table, number = angle
        touches_lanes = any(parity.lanes for parity in parities)
        for case in range(1 << len(known)):
            value = {outside: case >> i & 1 for i, outside in enumerate(known)} | {0: 0}
            flips = [value[each & ~code.ONE] ^ (each & code.ONE != 0) for each in left]
            record = [0, table, number, int(not term.phase.angle.is_constant), len(term.guards), len(term.bits)]
            possible = True
            for i, parity in enumerate(parities):
                wanted = term.guards[i][1] if i < len(term.guards) else 0
                if i < len(term.guards) and not parity.rows and not parity.lanes:
                    possible &= flips[i] == wanted
                record += [parity.rows, parity.lanes, flips[i] ^ wanted]
            record[0] = len(record)
            if possible:
                yield tuple((outside, value[outside]) for outside in known), record, touches_lanes

    # ---- arrays -------------------------------------------------------------------------------------------------

    def _end_batch(self) -> None:
        """Sweeps since the last batch are one; its values and sums are counted from 0."""
        last = self._batches[-1] if self._batches else Batch(slice(0), slice(0), 0, 0, slice(0))
        made = slice(last.sweeps.stop, len(self._sweeps) // code.SWEEP_FIELDS)
        if made.start == made.stop:
            return
        ops = slice(last.ops.stop, len(self._ops) // code.FIELDS)
        constants = slice(last.constants.stop, len(self._constant_places) // 3)
        self._batches.append(Batch(made, ops, self._sizes["values"], self._sizes["sums"], constants))
        self._sizes["values"] = self._sizes["sums"] = 0

    def _halves(self, full: NDArray) -> NDArray:
        """A table that is linear but for its first entry, as its kernel has it."""
        if not self._halved:
            return full
        low = np.zeros(code.LOW, dtype=full.dtype)
        low[: len(full)] = full[: code.LOW]
        return np.concatenate([low, full[:: code.LOW] ^ full[:1]])

    def _once(self, key: tuple[object, ...], make: Callable[[], NDArray]) -> tuple[int, int]:
        """Where a table is that others may want as well, and how many entries it has; the key begins with its pool."""
        if key not in self._known:
            full = make()
            self._known[key] = (self._add(str(key[0]), self._halves(full)), len(full))
        return self._known[key]

    def _add(self, pool: str, numbers: NDArray) -> int:
        """Where in its pool it begins."""
        kept = self._rows if pool == "rows" else self._places
        begin = len(kept)
        kept.extend(numbers)
        return begin

    def _constant(self, numbers: NDArray[np.float64]) -> int:
        self._constant_places.extend((self._sizes["values"], len(self._constants), len(numbers)))
        self._constants.extend(numbers)
        return self._skip("values", len(numbers))

    def _skip(self, kind: str, count: int) -> int:
        begin = self._sizes[kind]
        self._sizes[kind] += count
        return begin

    def _add_pairs(self, pairs: Sequence[tuple[int, int]]) -> int:
        begin = len(self._pairs) // 2
        for pair in pairs:
            self._pairs.extend(pair)
        return begin


def _xors(masks: Iterable[int]) -> NDArray[np.int64]:
    """Entry i is the exclusive or of masks[j] over the bits j of i."""
    made = np.zeros(1, dtype=np.int64)
    for mask in masks:
        made = np.concatenate([made, made ^ mask])
    return made


def _chosen(wanted: Sequence[tuple[int, int]], row_bits: int, banks: int) -> NDArray[np.int32]:
    """The rows in which each parity has its value. If possible, 2^banks adjacent ones of the list are in different
    banks of shared memory."""
    rows = np.arange(1 << row_bits, dtype=np.int32)
    for mask, value in wanted:
        rows = rows[(np.bitwise_count(rows & np.int32(mask)) & 1) == value]
    if not banks or len(rows) < 2:
        return rows
    spread: list[int] = []
    rest: list[int] = []
    seen = {0}  # the banks that sums of `spread` are in
    for bit in range(len(rows).bit_length() - 1):
        vector = int(rows[1 << bit] ^ rows[0])
        bank = vector & ((1 << banks) - 1)
        (rest if bank in seen else spread).append(vector)
        seen |= {bank ^ other for other in seen}
    return (_xors([*spread, *rest]) ^ rows[0]).astype(np.int32)
