"""A program of kernels/code.py as tiles.cu reads it: passes over a tile with 2^R rows of each thread in registers.

Note: numbers of rows. In a pass, thread t has the rows U(t + (j << THREAD_BITS)) for j < 2^R in registers, shifted as
outside bits require; U is linear. Its register bits are those that are turned, and others where fewer than R are. So
the parities that phases read are parities of t, of j, or of both: one factor for each thread, one for each register,
and a table for the rest. Phases belong to the pass before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.circuit.growable import Numbers
from unisono.quantum.compile.assembly import Code
from unisono.quantum.compile.frame import odd
from unisono.quantum.kernels import code as fields

FACTOR_SLOTS = 64  # passes of a sweep whose factors of registers are in shared memory
KEPT_SLOTS = 3  # phases of a sweep whose sums for gradients are: 15 KiB of complex64, 24 KiB of complex128

# fields of a pass that hold something else than in kernels/code.py
FACTORS = fields.FORM  # slot of its factors of registers; NO_FACTORS, or MORE_FACTORS where slots are used up
PHASE_COUNT = fields.VALUES  # instructions after it that are its phases
SWAPPED = fields.FIELDS  # the bits of it whose turns are divided by their sine: as angles ask for
NO_FACTORS, MORE_FACTORS = -1, -2
# and of a phase: its slot for sums of threads in gradients, or -1; where its values begin, or -1
KEPT = fields.FORM
OF_THREADS, OF_REGISTERS, OF_ROWS = fields.MASK0, fields.MASK1, fields.MASK2

_STEEPEST = (4.0, 16.0)  # tangents that turns may have
_GROWTH = 40  # bits by which amplitudes may grow in a sweep; gradients are products of two

OP_FIELDS = 16  # of an instruction: those of kernels/code.py, up to whole loads of 16 bytes

# fields of a job of the kernel that fills in phases
JOB_RECORDS, JOB_COUNT, JOB_VALUES, JOB_SIZE, JOB_SHIFT, JOB_FIELDS = range(6)

NAMES = {name: value for name, value in globals().items() if name.isupper()}


class GpuProgram:
    def __init__(self, code: Code, register_bits: int, thread_bits: int) -> None:
        self._code, self._registers, self._threads = code, register_bits, thread_bits
        self.copies = max(0, register_bits - code.row_bits)  # register bits of a small tile that stand for nothing
        self._ops, self._terms, self._jobs = (Numbers(np.int32) for _ in range(3))
        self._pairs = Numbers(np.int64)
        self._matrices = Numbers(np.float64)
        self.phase_entries = 0
        self.sweeps = code.sweeps.copy()
        self._rows = Numbers(np.int32)
        self._rows.extend(code.rows)
        self._known: dict[tuple[int, ...], int] = {}  # where the rows of threads are that have these masks
        self.slots = 0  # of factors of registers, in one sweep
        self.kept: list[int] = []  # of each sweep: phases that keep sums of threads
        self._constants = {begin: code.constants[at : at + size] for begin, at, size in code.constant_places.tolist()}
        for sweep in self.sweeps:
            self._sweep(sweep)
        self.rows = self._rows.array
        self.ops = self._ops.array.reshape(-1, OP_FIELDS)
        self.pairs, self.terms, self.matrices = self._pairs.array, self._terms.array, self._matrices.array
        self.jobs = self._jobs.array.reshape(-1, JOB_FIELDS)
        self.most_ops = int((self.sweeps[:, fields.LAST] - self.sweeps[:, fields.FIRST]).max(initial=0))

    def _sweep(self, sweep: NDArray[np.int64]) -> None:
        ops = self._code.ops[sweep[fields.FIRST] : sweep[fields.LAST]].tolist()
        first = len(self._ops) // OP_FIELDS
        self._slots_here = self._kept_here = 0
        at = 0
        while at < len(ops):
            op = ops[at]
            end = at + 1
            if op[fields.KIND] in (fields.TURNS, fields.PHASE):
                if op[fields.KIND] == fields.PHASE:
                    op, end = self._empty(), at
                begin = end
                while end < len(ops) and ops[end][fields.KIND] == fields.PHASE:
                    end += 1
                self._pass(op, ops[begin:end])
            else:
                if op[fields.KIND] == fields.DENSE:
                    matrix = self._constants[op[fields.VALUES]][1:]  # after the weight of the one lane
                    op[fields.VALUES] = len(self._matrices) // 2
                    self._matrices.extend(matrix)
                self._add(op, self._flips(op), self._conditions(op))
            at = end
        flips = self._pairs_of(int(sweep[fields.SWEEP_FLIPS]), int(sweep[fields.SWEEP_FLIP_COUNT]))
        sweep[fields.SWEEP_FLIPS] = self._add_pairs(flips)
        sweep[fields.FIRST], sweep[fields.LAST] = first, len(self._ops) // OP_FIELDS
        self.slots = max(self.slots, self._slots_here)
        self.kept.append(self._kept_here)

    def _empty(self) -> list[int]:
        """A pass that turns nothing."""
        op = [0] * fields.FIELDS
        op[fields.KIND], op[fields.SLOT] = fields.TURNS, -1
        return op

    def _pass(self, op: list[int], phases: Sequence[list[int]]) -> None:
        turned, row_bits = op[fields.COUNT], self._code.row_bits
        rows = self._code.rows[op[fields.ROWS] :]
        free = [int(rows[1 << bit] ^ rows[0]) if turned else 1 << bit for bit in range(row_bits - turned)]
        read = {mask for phase in phases for record in _records(self._code, phase) for mask in record[6::3]}
        chosen = _idle(free, sorted(read), self._registers - turned)
        threads = [vector for number, vector in enumerate(free) if number not in chosen]
        registers = [*op[fields.MASK0 : fields.MASK0 + turned], *chosen.values()]
        registers += [0] * (self._registers - len(registers))
        op[fields.MASK0 : fields.MASK0 + self._registers] = registers
        op[fields.ROWS], op[fields.ROW_COUNT] = self._thread_rows(threads), 1 << len(threads)
        numbers = _Numbers([*threads, *[0] * (self._threads - len(threads)), *registers])
        flips = self._flips(op)
        made = [self._phase(phase, numbers, flips) for phase in phases]
        op[FACTORS] = NO_FACTORS
        if any(phase[OF_REGISTERS] >= 0 for phase, _, _ in made):
            op[FACTORS] = self._slots_here if self._slots_here < FACTOR_SLOTS else MORE_FACTORS
            self._slots_here += op[FACTORS] >= 0
        op[PHASE_COUNT] = len(made)
        self._add(op, flips, [])
        for each in made:
            self._add(*each)

    def _thread_rows(self, masks: Sequence[int]) -> int:
        """Where the rows are of threads whose bits stand for these masks."""
        key = tuple(masks)
        if key not in self._known:
            made = np.zeros(1, dtype=np.int32)
            for mask in masks:
                made = np.concatenate([made, made ^ np.int32(mask)])
            self._known[key] = len(self._rows)
            self._rows.extend(made)
        return self._known[key]

    def _phase(self, op: list[int], numbers: _Numbers, flips: Pairs) -> tuple[list[int], Pairs, Pairs]:
        """Its records sorted: those that read bits of t alone, of j alone, of both."""
        low = (1 << self._threads) - 1
        sorted_records: list[list[list[int]]] = [[], [], []]
        for record in _records(self._code, op):
            for at in range(6, len(record), 3):
                record[at] = numbers.parity(record[at])
            masks = record[6::3]
            kind = 0 if all(mask <= low for mask in masks) else 1 if not any(mask & low for mask in masks) else 2
            sorted_records[kind].append(record)
        made = [0] * fields.FIELDS
        made[fields.KIND], made[fields.SLOT], made[fields.COUNT] = fields.PHASE, op[fields.SLOT], op[fields.COUNT]
        made[fields.ROWS] = len(self._terms)
        with_gradient = [record for records in sorted_records for record in records if record[3]]
        made[KEPT] = -1
        if self._kept_here < KEPT_SLOTS and with_gradient and all(map(self._is_simple, with_gradient)):
            made[KEPT], self._kept_here = self._kept_here, self._kept_here + 1
        sizes = (1 << self._threads, 1 << self._registers, 1 << (self._threads + self._registers))
        for kind, (records, size) in enumerate(zip(sorted_records, sizes, strict=True)):
            made[OF_THREADS + kind] = self.phase_entries if records else -1
            if records:
                shift = self._threads if kind == 1 else 0
                self._jobs.extend((len(self._terms), len(records), self.phase_entries, size, shift))
                self.phase_entries += size
            for record in records:
                self._terms.extend(record)
        own = [(outside, numbers.of(mask)) for outside, mask in [*self._flips(op), *flips]]
        return made, own, self._conditions(op)

    def _is_simple(self, record: Sequence[int]) -> bool:
        """Whether a record reads one parity, of at most one bit of the register."""
        return record[4] == 0 and record[5] == 1 and (record[6] >> self._threads).bit_count() <= 1

    def _flips(self, op: Sequence[int]) -> Pairs:
        return self._pairs_of(op[fields.FLIPS], op[fields.FLIP_COUNT])

    def _conditions(self, op: Sequence[int]) -> Pairs:
        return self._pairs_of(op[fields.CONDITIONS], op[fields.CONDITION_COUNT])

    def _pairs_of(self, begin: int, count: int) -> Pairs:
        return [(first, second) for first, second in self._code.pairs[begin : begin + count].tolist()]

    def _add(self, op: list[int], flips: Pairs, conditions: Pairs) -> None:
        op[fields.FLIPS], op[fields.FLIP_COUNT] = self._add_pairs(flips), len(flips)
        op[fields.CONDITIONS], op[fields.CONDITION_COUNT] = self._add_pairs(conditions), len(conditions)
        self._ops.extend([*op, *[0] * (OP_FIELDS - fields.FIELDS)])

    def _add_pairs(self, pairs: Pairs) -> int:
        begin = len(self._pairs) // 2
        for pair in pairs:
            self._pairs.extend(pair)
        return begin


Pairs = list[tuple[int, int]]


def _idle(vectors: Sequence[int], reads: Sequence[int], count: int) -> dict[int, int]:
    """Vectors for register bits that are not turned: by the number of the one that each replaces among the given ones.

    They are sums that change no parity of `reads`, as far as there are any: those then depend on the thread alone."""
    solved: dict[int, tuple[int, int]] = {}  # leading bit of the parities that a sum changes -> those, and the sum
    changed = [sum(odd(read & vector) << bit for bit, read in enumerate(reads)) for vector in vectors]
    chosen: dict[int, int] = {}
    for number, vector in enumerate(vectors):
        left = changed[number]
        while left and (found := solved.get(left.bit_length() - 1)):
            left, vector = left ^ found[0], vector ^ found[1]
        if left:
            solved[left.bit_length() - 1] = (left, vector)
        else:
            chosen[number] = vector
    chosen = dict(sorted(chosen.items())[max(0, len(chosen) - count) :])
    for number in reversed(range(len(vectors))):
        if len(chosen) >= min(count, len(vectors)):
            break
        chosen.setdefault(number, vectors[number])
    return chosen


class _Numbers:
    """Rows of a pass by number: bit k of a number stands for row mask vectors[k]; some of these may be 0."""

    def __init__(self, vectors: Sequence[int]) -> None:
        self._vectors = vectors
        self._solved: dict[int, tuple[int, int]] = {}
        for number, vector in enumerate(vectors):
            vector, source = self._reduced(vector, 1 << number)
            if vector:
                self._solved[vector.bit_length() - 1] = (vector, source)

    def _reduced(self, vector: int, source: int) -> tuple[int, int]:
        while vector and (found := self._solved.get(vector.bit_length() - 1)):
            vector, source = vector ^ found[0], source ^ found[1]
        return vector, source

    def of(self, mask: int) -> int:
        left, source = self._reduced(mask, 0)
        assert not left
        return source

    def parity(self, mask: int) -> int:
        """The parity of a row as one of its number."""
        return sum(odd(mask & vector) << bit for bit, vector in enumerate(self._vectors))


class Passes:
    """Which turns are in which pass."""

    def __init__(self, ops: NDArray[np.int32]) -> None:
        self._size = len(ops)
        number = np.flatnonzero((ops[:, fields.KIND] == fields.TURNS) & (ops[:, fields.COUNT] > 0))
        counts, slots = ops[number, fields.COUNT], ops[number, fields.SLOT]
        self._number = np.repeat(number, counts)
        self._bit = np.arange(len(self._number)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._turn = np.repeat(slots, counts) + self._bit

    def bits(self, swapped: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Of each instruction: the bits of those of its turns that are swapped."""
        made = np.zeros(self._size, dtype=np.int32)
        np.add.at(made, self._number, swapped[self._turn].astype(np.int32) << self._bit.astype(np.int32))
        return made


class Scaling:
    """What the kernels leave out: turns are divided by a cosine or sine each, and a sweep multiplies by all of these at
    its end. A gradient is a product of two states, so it lacks the square of what later turns were divided by."""

    def __init__(self, code: Code) -> None:
        self.angles_of: list[tuple[int, int, int, int]] = []  # of a sweep: first turn, turns, first term, terms
        self._guarded = np.zeros(code.turns, dtype=bool)
        self._bounds = [0]
        self._after = np.zeros(len(code.angles), dtype=np.int64)  # entry of the products that an angle lacks
        turns = terms = 0
        for number, sweep in enumerate(code.sweeps):
            first_term = terms
            for op in code.ops[sweep[fields.FIRST] : sweep[fields.LAST]].tolist():
                if op[fields.KIND] == fields.PHASE:
                    for record in _records(code, op):
                        if record[2] >= 0:
                            self._after[code.turns + record[2]] = turns + number
                            terms = max(terms, record[2] + 1)
                elif op[fields.KIND] != fields.DENSE:
                    begin, turns = turns, turns + op[fields.COUNT]
                    self._guarded[begin:turns] = op[fields.KIND] == fields.PAIR
                    self._after[begin:turns] = turns + number
            self.angles_of.append((self._bounds[-1], turns - self._bounds[-1], first_term, terms - first_term))
            self._bounds.append(turns)

    def swapped(self, cosine: NDArray[np.float64], sine: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which turns are divided by their sine: the fewer the better, as long as amplitudes do not grow too large."""
        cosine, sine = np.abs(cosine), np.abs(sine)
        chosen = sine > cosine
        for most in _STEEPEST:
            wider = sine > most * cosine
            growth = np.append(0.0, np.cumsum(-np.log2(np.where(self._guarded, 1.0, np.where(wider, sine, cosine)))))
            fits = np.diff(growth[self._bounds]) <= _GROWTH
            chosen = np.where(np.repeat(fits, np.diff(self._bounds)), wider, chosen)
        return chosen

    def factors(self, divisors: NDArray[np.float64], copies: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What each sweep multiplies by, and what the states lack where the gradient of each angle is taken.

        Passes over tiles with `copies` idle register bits add up each gradient 2^copies times."""
        divided = np.where(self._guarded, 1.0, divisors)
        products = np.ones(len(divisors) + len(self._bounds))
        for number, (begin, end) in enumerate(pairwise(self._bounds)):
            products[begin + number : end + number] = np.cumprod(divided[begin:end][::-1])[::-1]
        starts = np.array(self._bounds[:-1], dtype=np.int64) + np.arange(len(self._bounds) - 1)
        lacked = products[self._after]
        lacked[~np.append(self._guarded, np.zeros(len(lacked) - len(divisors), dtype=bool))] *= 0.5 ** (copies / 2)
        return products[starts], lacked


def _records(code: Code, op: Sequence[int]) -> Iterator[list[int]]:
    at = op[fields.ROWS]
    for _ in range(op[fields.COUNT]):
        size = int(code.terms[at])
        yield code.terms[at : at + size].tolist()
        at += size
