"""The one algorithm of the scheduler: partition operations into segments, each of which mixes few wires.

The same partition serves every level: wires that fit a node, wires that fit a rank, axes that fit a cache. A segment is
grown in program order (or, from the end, against it): an operation joins when nothing it must follow is left out and
its mixed wires fit beside those taken already. Operations that commute with what is left out overtake it; so
the end of a segment is delayed as long as any operation can go first.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from unisono.quantum.circuit.commutation import moves, wire_paulis
from unisono.quantum.circuit.growable import ChunkedList
from unisono.quantum.circuit.operation import Operation

_IS_OPEN = operator.attrgetter("open")


@dataclass
class Cluster:
    """A segment: the wires it mixes, its operations in an order that may be run, and where in the input each stood."""

    active: set[int] = field(default_factory=set)
    operations: list[Operation] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class Order:
    """What must follow what: on each wire, operations with equal Paulis form a group that waits for the one before."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._groups: list[tuple[_Group, ...]] = [()] * len(operations)
        last: dict[Hashable, tuple[str, _Group]] = {}
        for number, operation in enumerate(operations):
            mine = []
            for wire, pauli in _touched(operation):
                known, group = last.get(wire, ("", None))
                if group is None or pauli == "*" or pauli != known:
                    group = _Group(group)
                    last[wire] = (pauli, group)
                group.left += 1
                mine.append(group)
            self._groups[number] = tuple(mine)

    def ready(self, number: int) -> bool:
        return all(map(_IS_OPEN, self._groups[number]))

    def finish(self, number: int) -> None:
        for group in self._groups[number]:
            group.left -= 1
            if not group.left:
                group.open = False
                if group.after is not None:
                    group.after.open = True


class _Group:
    """`left` operations on a wire that may run while it is `open`; the group `after` it waits for all of them."""

    __slots__ = ("after", "left", "open")

    def __init__(self, before: _Group | None) -> None:
        self.left, self.open = 0, before is None
        self.after: _Group | None = None
        if before is not None:
            before.after = self


def cluster(
    operations: Sequence[Operation],
    capacity: int,
    *,
    relabel: bool = False,
    bundle: frozenset[int] = frozenset(),
    free: frozenset[int] = frozenset(),
) -> list[Cluster]:
    """Segments that mix at most `capacity` wires each and together are the operations: grown from the front, or from
    the back where that makes fewer.

    With `relabel`, wires that are not active are global, and ranks may be renamed: gates that only permute basis
    states are free there. Wires of `bundle` are active all together or not at all; wires that
    are `free` need no room."""
    forwards = _cluster(operations, capacity, relabel, bundle, free)
    if len(forwards) <= 2:
        return forwards
    backwards = _cluster(operations[::-1], capacity, relabel, bundle, free)
    if len(backwards) >= len(forwards):
        return forwards
    last = len(operations) - 1
    return [
        Cluster(part.active, part.operations[::-1], [last - number for number in reversed(part.numbers)])
        for part in reversed(backwards)
    ]


def cluster_until(
    operations: Sequence[Operation],
    wanted: Collection[int],
    capacity: int,
    *,
    bundle: frozenset[int] = frozenset(),
    free: frozenset[int] = frozenset(),
) -> tuple[list[Operation], list[Operation]]:
    """(first, rest): as few segments as `cluster` makes that have all operations whose numbers are `wanted`, and
    whatever else fits those segments; and what does not. No wanted operation may have to follow one that is not."""
    order = Order(operations)
    needs = _all_needs(operations, False, bundle, free)
    left: Sequence[int] | ChunkedList[int] = sorted(range(len(operations)), key=lambda number: number not in wanted)
    first: list[Operation] = []
    while next(iter(left), None) in wanted:
        part, left = _grow(operations, left, needs, order, capacity)
        first += part.operations
    return first, [operations[number] for number in left]


def _cluster(
    operations: Sequence[Operation], capacity: int, relabel: bool, bundle: frozenset[int], free: frozenset[int]
) -> list[Cluster]:
    order = Order(operations)
    needs = _all_needs(operations, relabel, bundle, free)
    left: Sequence[int] | ChunkedList[int] = range(len(operations))
    clusters = []
    while left:
        part, left = _grow(operations, left, needs, order, capacity)
        clusters.append(part)
    return clusters


Needs = tuple[frozenset[int], bool]  # the wires an operation mixes, and whether it may run with all of its wires global


def _grow(
    operations: Sequence[Operation], left: Iterable[int], needs: Sequence[Needs], order: Order, capacity: int
) -> tuple[Cluster, ChunkedList[int]]:
    """A segment of what is left, and what is left then."""
    active: set[int] = set()
    taken: ChunkedList[int] = ChunkedList()
    later: ChunkedList[int] = ChunkedList()
    for number in left:
        if not order.ready(number):
            later.append(number)
            continue
        mixed, permutes = needs[number]
        outside = mixed - active
        fits = len(active) + len(outside) <= capacity
        if not fits and permutes and len(active) == capacity:
            fits, outside = active.isdisjoint(operations[number].wires), frozenset()
        if fits:
            order.finish(number)
            active |= outside
            taken.append(number)
        else:
            later.append(number)
    if not taken:
        raise AssertionError(f"no operation fits {capacity} wires; the caller checks the widest first")
    return Cluster(active, list(ChunkedList(operations[number] for number in taken)), list(taken)), later


def _all_needs(
    operations: Sequence[Operation], relabel: bool, bundle: frozenset[int], free: frozenset[int]
) -> list[Needs]:
    """Equal ones are one object: there are far fewer than operations."""
    known: dict[Needs, Needs] = {}
    found = (_bundled(_needs(operation, relabel), bundle, free) for operation in operations)
    return list(ChunkedList(known.setdefault(each, each) for each in found))


def _needs(operation: Operation, relabel: bool) -> Needs:
    mixed = frozenset(w for w, pauli in zip(operation.wires, wire_paulis(operation), strict=True) if pauli != "Z")
    permutes = relabel and bool(mixed) and not operation.condition and moves(operation.gate) is not None
    if permutes and len(operation.wires) == 1:
        return frozenset(), False  # global or local, X and Y always run
    return mixed, permutes


def _bundled(needs: Needs, bundle: frozenset[int], free: frozenset[int]) -> Needs:
    mixed, permutes = needs[0] - free, needs[1]
    return (mixed | bundle if mixed & bundle else mixed), permutes


def _touched(operation: Operation) -> list[tuple[Hashable, str]]:
    """(wire, Pauli) pairs; classical bits, and the order of random draws, are wires of their own kind."""
    touched: list[tuple[Hashable, str]] = [*zip(operation.wires, wire_paulis(operation), strict=True)]
    if not operation.is_unitary:
        touched += [(("bit", bit), "*") for bit in operation.bits]
        touched += [(("bit", bit), "Z") for bit, _ in operation.condition if bit not in operation.bits]
        if not operation.gate.unitary and operation.name != "barrier":
            touched.append(("draws", "*"))
    return touched
