"""Sweeps whose tiles are linear subspaces: CNOT and X cost nothing, also between bits of different tiles.

A CNOT maps basis states linearly over GF(2), so it only changes which index stands for which wires. Relative to the
index of the amplitudes, a rotation pairs index i with i ^ mask, and what it and a phase read are parities of i. A sweep
is a subspace V of index masks: its tiles are the cosets of V, and it runs every rotation whose mask is in V. V always
contains the lowest `near` bits, so that memory is read in contiguous pieces.

Writing a tile back, a sweep may apply any affine map that moves amplitudes within their coset. It applies the one that
brings the index closest to the wires as they are after the finished operations. When all operations are finished, a few
sweeps at most restore the plain order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.circuit.operation import Operation
from unisono.quantum.compile.frame import Parity, odd
from unisono.quantum.compile.lowering import Dense, Flip, Phase, Rotation, lower
from unisono.quantum.compile.stages import CompiledStage, Guards, Mix, Term, add_mix, add_term, changes
from unisono.quantum.kernels.code import ONE

_WINDOW = 1024  # operations looked at for one sweep
_MOST = 512  # that one sweep has
_MOST_MIXING = 64  # of these: a kernel that leaves out cosines lets amplitudes grow up to a sweep's end
_TRIALS = 64  # row numberings tried for one that reads and writes shared memory without bank conflicts


class Span:
    """A subspace of GF(2)^n, as vectors by their leading bit."""

    def __init__(self, vectors: Iterable[int] = ()) -> None:
        self.leading: dict[int, int] = {}
        for vector in vectors:
            self.add(vector)

    def __len__(self) -> int:
        return len(self.leading)

    def reduce(self, vector: int) -> int:
        """0 if the vector is in the span; else what is left of it."""
        for bit, base in self.leading.items():
            if vector >> bit & 1:
                vector ^= base
        return vector

    def add(self, vector: int) -> bool:
        """Whether it was not in the span. Vectors stay reduced: no leading bit occurs in another vector."""
        vector = self.reduce(vector)
        if not vector:
            return False
        leading = vector.bit_length() - 1
        for bit, base in self.leading.items():
            if base >> leading & 1:
                self.leading[bit] = base ^ vector
        self.leading[leading] = vector
        return True

    def missing(self, vectors: Sequence[int]) -> int:
        """How many dimensions the vectors would add."""
        left = [each for each in map(self.reduce, vectors) if each]
        return len(left) if len(left) < 2 else len(Span(left))


class LinearMap:
    """A linear map of GF(2)^n: the images of the unit vectors."""

    def __init__(self, images: Sequence[int]) -> None:
        self.images = list(images)

    def __call__(self, vector: int) -> int:
        image = 0
        while vector:
            low = vector & -vector
            image ^= self.images[low.bit_length() - 1]
            vector ^= low
        return image

    @classmethod
    def identity(cls, bits: int) -> LinearMap:
        return cls([1 << bit for bit in range(bits)])

    @classmethod
    def of_pairs(cls, pairs: Iterable[tuple[int, int]], bits: int) -> LinearMap:
        """The map that takes each source, of a basis, to its target."""
        solved: dict[int, tuple[int, int]] = {}
        for source, target in pairs:
            source, target = _eliminated(solved, source, target)
            solved[source.bit_length() - 1] = (source, target)
        return cls([_eliminated(solved, 1 << bit, 0)[1] for bit in range(bits)])

    def kernel(self) -> list[int]:
        """A basis of what is mapped to 0."""
        solved: dict[int, tuple[int, int]] = {}
        found = []
        for bit, image in enumerate(self.images):
            image, source = _eliminated(solved, image, 1 << bit)
            if image:
                solved[image.bit_length() - 1] = (image, source)
            else:
                found.append(source)
        return found

    def inverse(self) -> LinearMap:
        return LinearMap.of_pairs(((image, 1 << bit) for bit, image in enumerate(self.images)), len(self.images))


def _eliminated(solved: dict[int, tuple[int, int]], vector: int, with_it: int) -> tuple[int, int]:
    while vector and (found := solved.get(vector.bit_length() - 1)):
        vector, with_it = vector ^ found[0], with_it ^ found[1]
    return vector, with_it


@dataclass(frozen=True)
class Item:
    """A primitive that is no flip, in terms of the index before the first operation: the masks by which it mixes, and
    the parities that it reads (those of its bits, then those of its controls); ONE in a parity flips it."""

    number: int
    primitive: Rotation | Phase | Dense
    masks: tuple[int, ...]
    reads: tuple[int, ...]
    wires: tuple[int, ...]  # as bits


@dataclass(frozen=True)
class LinearSweep:
    """Row bit j of a tile stands for index mask `basis[j]`; `outside` are the bits that number the tiles. `start` and
    `order` are the row masks of the bits of a place in a tile, at the beginning and at the end."""

    basis: tuple[int, ...]
    outside: tuple[int, ...]
    stages: tuple[CompiledStage, ...]
    start: tuple[int, ...]
    order: tuple[int, ...]
    order_flips: tuple[tuple[int, int], ...]  # (outside mask, row mask)


def linear_sweeps(
    operations: Sequence[Operation], bits: int, row_bits: int, near: int, banks: int
) -> list[LinearSweep]:
    """Tiles of 2^row_bits rows; rows that differ in the lowest `banks` bits are in different banks of shared memory."""
    primitives = list(_primitives(operations, bits))
    tried = [_Scheduler(primitives, bits, row_bits, near, policy) for policy in ("order", "recent")]
    if len(primitives) > _WINDOW:
        tried = tried[:1]
    made = [list(scheduler.sweeps()) for scheduler in tried]
    return [_tile(planned, banks) for planned in min(made, key=len)]


# ---- scheduling ----------------------------------------------------------------------------------------------------


def _primitives(operations: Iterable[Operation], bits: int) -> Iterator[Item | Flip]:
    """Bits instead of axes; what precedes an item is in its masks and reads."""
    top = bits - 1
    parity = [1 << bit for bit in range(bits)]
    mask = [1 << bit for bit in range(bits)]
    number = 0
    for operation in operations:
        for primitive in lower(operation):
            if isinstance(primitive, Flip):
                target = top - primitive.target
                if primitive.control is None:
                    parity[target] ^= ONE
                    yield Flip(target)
                else:
                    control = top - primitive.control
                    parity[target] ^= parity[control]
                    mask[control] ^= mask[target]
                    yield Flip(target, control)
                continue
            masks: tuple[int, ...] = ()
            if isinstance(primitive, Phase):
                groups: list[list[int]] = [[top - axis for axis in group] for group in primitive.parities]
            else:
                targets = primitive.targets if isinstance(primitive, Dense) else (primitive.target,)
                groups = [[top - axis] for axis in targets]
                masks = tuple(mask[top - axis] for axis in targets)
            groups += [[top - axis] for axis, _ in primitive.controls]
            reads = tuple(_sum(parity[bit] for bit in group) for group in groups)
            yield Item(number, primitive, masks, reads, tuple({bit for group in groups for bit in group}))
            number += 1


def _sum(vectors: Iterable[int]) -> int:
    total = 0
    for vector in vectors:
        total ^= vector
    return total


@dataclass(frozen=True)
class _Taken:
    """An item with its masks and reads in terms of the index as it is in a sweep."""

    item: Item
    masks: tuple[int, ...]
    reads: tuple[int, ...]


@dataclass(frozen=True)
class _Planned:
    """A sweep: its subspace, its items in an order that may be run, and the map applied at the end,
    x -> moved(x) ^ shift."""

    span: Span
    items: tuple[_Taken, ...]
    moved: LinearMap
    shift: int
    bits: int


class _Scheduler:
    """Grows a subspace for each sweep. `policy` "order" adds the first operation that fits; "recent" prefers those that
    the sweep itself made possible, which keeps it on neighbouring wires, several layers deep."""

    def __init__(self, primitives: Sequence[Item | Flip], bits: int, row_bits: int, near: int, policy: str) -> None:
        self._bits, self._row_bits, self._near, self._recent = bits, row_bits, near, policy == "recent"
        self._coming = iter(primitives)
        self._program: list[Item | Flip] = []  # what is not finished, of the window
        self._waits: dict[int, int] = {}  # by number of an item of the window: how many others it must follow
        self._next: dict[int, list[Item]] = {}
        self._ready: dict[int, Item] = {}
        self._index = LinearMap.identity(bits)  # from the index before the first operation to that of now
        self._back = LinearMap.identity(bits)
        self._wires = [1 << bit for bit in range(bits)]  # masks of the wires after all finished operations
        self._flipped = 0  # wires that X has flipped

    def sweeps(self) -> Iterator[_Planned]:
        self._refill()
        shifted = 0
        while self._program or self._wires_moved() or shifted != self._flipped:
            span = Span(1 << bit for bit in range(self._near))
            taken: list[_Taken] = []
            while more := self._grow(span, len(taken), sum(bool(each.masks) for each in taken)):
                taken += more
                self._finish({each.item.number for each in more})
                self._refill()
            self._finish(set())  # flips that precede all items
            wires = [self._index(mask) for mask in self._wires]
            if not self._program:
                self._restore(span, wires, shifted)
            for bit in range(self._bits):
                if len(span) < self._row_bits:
                    span.add(1 << bit)
            moved = self._closest(span, wires)
            shift = 0
            if not self._program:
                left = self._flipped ^ moved(shifted)
                shift = left ^ span.reduce(left)
                shifted = moved(shifted) ^ shift
            yield _Planned(span, tuple(taken), moved, shift, self._bits)
            undo = moved.inverse()
            self._index = LinearMap([moved(image) for image in self._index.images])
            self._back = LinearMap([self._back(image) for image in undo.images])

    def _wires_moved(self) -> bool:
        return any(self._index(mask) != 1 << bit for bit, mask in enumerate(self._wires))

    def _refill(self) -> None:
        """Take the next primitives into the window; find which items of it they must follow."""
        if len(self._program) > _WINDOW // 2:
            return
        fresh: list[Item | Flip] = []
        for primitive in self._coming:
            fresh.append(primitive)
            if len(fresh) + len(self._program) >= _WINDOW:
                break
        old = [each for each in self._program if isinstance(each, Item)]
        new = [each for each in fresh if isinstance(each, Item)]
        self._program += fresh
        if new:
            known = [*old, *new]
            for number, follows in enumerate(_conflicts(new, known)):
                item = new[number]
                before = np.flatnonzero(follows[: len(old) + number])
                self._waits[item.number] = len(before)
                for other in before.tolist():
                    self._next.setdefault(known[other].number, []).append(item)
                if not len(before):
                    self._ready[item.number] = item

    def _grow(self, span: Span, count: int, mixing: int) -> list[_Taken]:
        """Extend the span until no operation fits; the items that it runs, `count` having been taken before."""
        taken: list[_Taken] = []
        ready = {number: self._placed(item) for number, item in self._ready.items()}
        fresh: set[int] = set()
        inside = sorted(ready)
        while True:
            while inside:
                if count == _MOST or mixing == _MOST_MIXING:
                    return taken
                number = inside.pop(0)
                if number not in ready or not _runs(span, ready[number]):
                    continue
                taken.append(ready.pop(number))
                count, mixing = count + 1, mixing + bool(taken[-1].masks)
                del self._ready[number]
                for other in self._next.pop(number, ()):
                    self._waits[other.number] -= 1
                    if not self._waits[other.number]:
                        self._ready[other.number] = other
                        ready[other.number] = self._placed(other)
                        fresh.add(other.number)
                        inside.append(other.number)
            best = self._extension(span, ready, fresh)
            if best is None:
                return taken
            for mask in best.masks or [best.reads[0] & -best.reads[0]]:
                span.add(mask)
            inside = sorted(ready)

    def _extension(self, span: Span, ready: dict[int, _Taken], fresh: set[int]) -> _Taken | None:
        """What to extend the span for: operations that mix come first."""
        room = self._row_bits - len(span)
        best: _Taken | None = None
        if not room:
            return None
        for number in sorted(ready):
            each = ready[number]
            if each.masks and span.missing(each.masks) <= room:
                if not self._recent or number in fresh:
                    return each
                best = best or each
        return best or next((each for each in ready.values() if not each.masks), None)

    def _placed(self, item: Item) -> _Taken:
        return _Taken(item, tuple(map(self._index, item.masks)), tuple(map(self._now, item.reads)))

    def _now(self, read: int) -> int:
        """A parity of the first index as one of that of now."""
        return sum(odd(read & image) << bit for bit, image in enumerate(self._back.images)) | read & ONE

    def _finish(self, taken: set[int]) -> None:
        """Take finished items out of the program, and flips that no unfinished item precedes."""
        blocked: set[int] = set()
        left: list[Item | Flip] = []
        for primitive in self._program:
            if isinstance(primitive, Item):
                if primitive.number in taken:
                    del self._waits[primitive.number]
                    continue
                blocked.update(primitive.wires)
                left.append(primitive)
                continue
            wires = {primitive.target} if primitive.control is None else {primitive.target, primitive.control}
            if blocked & wires:
                blocked |= wires
                left.append(primitive)
            elif primitive.control is None:
                self._flipped ^= 1 << primitive.target
            else:
                self._wires[primitive.control] ^= self._wires[primitive.target]
                if self._flipped >> primitive.control & 1:
                    self._flipped ^= 1 << primitive.target
        self._program = left

    def _restore(self, span: Span, wires: Sequence[int], shifted: int) -> None:
        """Use the room that is left for moving wires to their places."""
        wanted = [wire ^ 1 << bit for bit, wire in enumerate(wires)] + [shifted ^ self._flipped]
        for vector in wanted:
            if len(span) < self._row_bits:
                span.add(vector)

    def _closest(self, span: Span, wires: Sequence[int]) -> LinearMap:
        """The map, equal to the identity modulo the span, that takes as much as it can of the wires to their bits."""
        at = LinearMap(wires)
        apart = LinearMap([span.reduce(wire ^ 1 << bit) for bit, wire in enumerate(wires)])
        pairs = [(at(vector), vector) for vector in apart.kernel()]
        sources, targets = Span(source for source, _ in pairs), Span(target for _, target in pairs)
        vectors = list(span.leading.values())
        rest = []
        for vector in [vector for vector in vectors if sources.add(vector)]:
            if targets.add(vector):
                pairs.append((vector, vector))
            else:
                rest.append(vector)
        pairs += zip(rest, [vector for vector in vectors if rest and targets.add(vector)], strict=True)
        pairs += [(1 << bit, 1 << bit) for bit in range(self._bits) if sources.add(1 << bit)]
        return LinearMap.of_pairs(pairs, self._bits)


def _runs(span: Span, taken: _Taken) -> bool:
    """Whether a sweep runs an item: one that mixes, if it can; a phase, where one of its parities varies in a tile."""
    if taken.masks:
        return not span.missing(taken.masks)
    return not taken.reads or any(odd(read & vector) for read in taken.reads for vector in span.leading.values())


def _conflicts(new: Sequence[Item], known: Sequence[Item]) -> NDArray[np.bool_]:
    """Of each new item and each known one: whether one changes what the other reads."""
    return _changes(new, known) | _changes(known, new).T


def _changes(changing: Sequence[Item], reading: Sequence[Item]) -> NDArray[np.bool_]:
    found = np.zeros((len(changing), len(reading)), dtype=bool)
    owners = np.array([number for number, item in enumerate(reading) for _ in item.reads], dtype=np.int64)
    reads = np.array([read & ~ONE for item in reading for read in item.reads], dtype=np.int64)
    for number, item in enumerate(changing):
        for mask in item.masks:
            found[number, owners[(np.bitwise_count(reads & mask) & 1).astype(bool)]] = True
    return found


# ---- tiles ---------------------------------------------------------------------------------------------------------


class _Rows:
    """Index masks as row masks, and parities of the index as parities of rows and outside bits."""

    def __init__(self, basis: Sequence[tuple[int, int]], bits: int, masks: Sequence[int], banks: int) -> None:
        self.basis = tuple(vector for _, vector in basis)
        self.masks = tuple(masks)
        self._leading = [bit for bit, _ in basis]
        self.outside = tuple(bit for bit in range(bits) if bit not in self._leading)
        low = [1 << j | sum(1 << k for k in range(banks, len(masks)) if masks[k] >> j & 1) for j in range(banks)]
        self._parities = [*low[: len(masks)], *(1 << k for k in range(banks, len(masks)))]

    def mask(self, vector: int) -> int:
        return _sum(mask for bit, mask in zip(self._leading, self.masks, strict=True) if vector >> bit & 1)

    def parity(self, read: int) -> Parity:
        rows = _sum(own for vector, own in zip(self.basis, self._parities, strict=True) if odd(read & vector))
        outside = sum(1 << number for number, bit in enumerate(self.outside) if read >> bit & 1)
        return Parity(rows=rows, outside=outside | read & ONE)


def _tile(planned: _Planned, banks: int) -> LinearSweep:
    undo = planned.moved.inverse()
    basis = sorted(planned.span.leading.items())
    rows = _numbered(basis, planned.bits, banks, [undo(vector) for _, vector in basis[:banks]])
    stages: list[CompiledStage] = []
    for taken in planned.items:
        primitive = taken.item.primitive
        parities = [rows.parity(read) for read in taken.reads]
        count = len(parities) - len(primitive.controls)
        guards = tuple(zip(parities[count:], (value for _, value in primitive.controls), strict=True))
        if isinstance(primitive, Phase):
            add_term(stages, Term(guards, tuple(parities[:count]), primitive))
        else:
            add_mix(stages, _mix(primitive, tuple(map(rows.mask, taken.masks)), tuple(parities[:count]), guards))
    _postpone(stages)
    flips = [(1 << number, rows.mask(1 << bit ^ undo(1 << bit))) for number, bit in enumerate(rows.outside)]
    flips.append((ONE, rows.mask(undo(planned.shift))))
    order = tuple(rows.mask(undo(vector)) for vector in rows.basis)
    kept = tuple((outside, mask) for outside, mask in flips if mask)
    return LinearSweep(rows.basis, rows.outside, tuple(stages), rows.masks, order, kept)


def _postpone(stages: Sequence[CompiledStage]) -> None:
    """Move each phase to the last stage that it commutes up to, where it merges with others."""
    for number in reversed(range(len(stages) - 1)):
        stay: list[Term] = []
        for term in stages[number].terms:
            last = number
            while last + 1 < len(stages) and not any(changes(mix.masks, term.reads) for mix in stages[last + 1].mixes):
                last += 1
            (stay if last == number else stages[last].terms).append(term)
        stages[number].terms[:] = stay


def _numbered(basis: Sequence[tuple[int, int]], bits: int, banks: int, ends: Sequence[int]) -> _Rows:
    """Rows numbered so that neither those of adjacent amplitudes at the beginning, nor those at the end (index masks
    `ends`), are in one bank: row bits above the banks also move a row to another bank."""
    draw = np.random.default_rng(0)
    skewed = [1 << j | (1 << (j - banks) % banks if j >= banks else 0) for j in range(len(basis))]
    rows = _Rows(basis, bits, skewed, banks)
    for _ in range(_TRIALS):
        low = (1 << banks) - 1
        if len(Span(rows.mask(end) & low for end in ends)) == len(ends):
            break
        moves = draw.integers(1 << banks, size=len(basis)).tolist()
        rows = _Rows(basis, bits, [1 << j | (moves[j] if j >= banks else 0) for j in range(len(basis))], banks)
    return rows


def _mix(primitive: Rotation | Dense, masks: tuple[int, ...], bits: tuple[Parity, ...], guards: Guards) -> Mix:
    """Guards whose rows depend on those of the guards before become conditions on outside bits alone."""
    solved: dict[int, tuple[int, int]] = {}
    kept: list[tuple[Parity, int]] = []
    for parity, value in guards:
        left, with_it = _eliminated(solved, parity.rows, 1 << len(kept))
        if parity.rows and not left:
            others = [kept[i] for i in range(len(kept)) if with_it >> i & 1]
            outside = _sum([parity.outside, *(other.outside for other, _ in others)])
            kept.append((Parity(outside=outside), value ^ _sum(each for _, each in others)))
            continue
        if left:
            solved[left.bit_length() - 1] = (left, with_it)
        kept.append((parity, value))
    read = [parity.rows for parity in bits] + [parity.rows for parity, _ in kept]
    guard_masks = {number: _only(read, len(bits) + number) for number, (parity, _) in enumerate(kept) if parity.rows}
    angle = primitive.angle if isinstance(primitive, Rotation) else None
    matrix = primitive.matrix if isinstance(primitive, Dense) else None
    return Mix(masks, bits, tuple(kept), angle, matrix, guard_masks)


def _only(reads: Sequence[int], wanted: int) -> int:
    """A row mask that changes the parity number `wanted` and none of the others (zero ones aside)."""
    solved: dict[int, tuple[int, int]] = {}  # leading bit -> a sum of parities, reduced by all others, and which
    for number, read in enumerate(reads):
        with_it = 1 << number
        for bit, (base, sources) in solved.items():
            if read >> bit & 1:
                read, with_it = read ^ base, with_it ^ sources
        if not read:
            continue
        leading = read.bit_length() - 1
        for bit, (base, sources) in solved.items():
            if base >> leading & 1:
                solved[bit] = (base ^ read, sources ^ with_it)
        solved[leading] = (read, with_it)
    return sum(1 << bit for bit, (_, sources) in solved.items() if sources >> wanted & 1)
