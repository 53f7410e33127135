"""From a circuit to steps: which operations run where, and when ranks exchange qubits.

    schedule = Schedule.of(circuit, ranks=32)
    schedule.exchanges, schedule.steps

Operations are put on logical qubits (logical_qubits.py) and partitioned at each level into segments that mix few wires
(partition.py); the wires of each segment are paged in (paging.py), and what need not precede an exchange is postponed
(postpone.py). A rank partitions its part of a segment again, into tiles that fit its cache (sweeps.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from unisono.errors import UsageError
from unisono.quantum.arguments import require_dtype
from unisono.quantum.circuit.circuit import Circuit, require_circuit
from unisono.quantum.circuit.commutation import mixed_wires
from unisono.quantum.circuit.growable import ChunkedList
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.operations import shared
from unisono.quantum.circuit.parameter import is_index
from unisono.quantum.schedule.logical_qubits import LogicalQubits, to_logical_qubits
from unisono.quantum.schedule.paging import Pages, Tier
from unisono.quantum.schedule.partition import cluster
from unisono.quantum.schedule.postpone import postponed
from unisono.quantum.schedule.step import CircuitSegment, Event, Exchange, Step
from unisono.quantum.schedule.sweeps import SWEEP, Sweep, cost

if TYPE_CHECKING:
    from unisono.quantum.schedule.forecast import Forecast, HostRates


@dataclass(frozen=True)
class Schedule:
    """Steps for a state whose first `global_qubits` positions are global qubits (step.py defines positions).

    `start[p]` is the wire at position p before the first step, `finish[p]` after the last. `prepare[w]` are constant
    gates on wire w alone that make the product state that the first step begins with."""

    wires: int
    global_qubits: int
    start: tuple[int, ...]
    finish: tuple[int, ...]
    steps: tuple[Step, ...]
    prepare: tuple[tuple[Operation, ...], ...]
    in_order: int = 0  # exchanges of the circuit in program order, a gate that mixes a global qubit costing one
    weights: int = 0  # how many of them the circuit reads
    features: int = 0

    @classmethod
    def of(
        cls,
        circuit: Circuit,
        ranks: int = 1,
        *,
        nodes: int = 1,
        start: Sequence[int] | None = None,
        sweep: Sweep = SWEEP,
    ) -> Schedule:
        """The schedule of a circuit on `ranks` ranks in `nodes` nodes, both powers of two.

        Without `start` the state begins as |0...0>, in any layout that suits; with it, as any state in that layout.
        `sweep` is what a rank can mix while it goes over its memory once."""
        require_circuit(circuit, "a schedule")
        global_qubits, outer = _global_qubits(circuit.wires, ranks), _global_qubits(circuit.wires, nodes)
        _check_start(start, circuit.wires)
        if not isinstance(sweep, Sweep):
            raise UsageError(f"sweep={sweep!r}: expected a Sweep")
        if outer > global_qubits:
            raise UsageError(f"{nodes} nodes for {ranks} ranks: expected no more nodes than ranks")
        ready = to_logical_qubits(circuit.operations, circuit.wires, circuit.wires - global_qubits, lead=start is None)
        begin, steps, end = _cheapest(ready.operations, circuit.wires, outer, global_qubits, start, sweep)
        in_order = _in_order(circuit.operations, global_qubits)
        read = circuit.weights, circuit.features
        return cls(circuit.wires, global_qubits, begin, _finish(ready, end), steps, ready.leading, in_order, *read)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(step for step in self.steps if isinstance(step, Exchange))

    @property
    def is_unitary(self) -> bool:
        return not any(isinstance(step, Event) for step in self.steps)

    def describe(self, dtype: torch.dtype = torch.complex64, rates: HostRates | None = None) -> Forecast:
        """What it will cost, before anything runs; print it, or read its fields."""
        from unisono.quantum.schedule.forecast import Forecast  # it runs kernels, which load numba

        return Forecast.of(self, require_dtype(dtype), rates)

    def inverse(self) -> Schedule:
        """The schedule that undoes this one, but for `prepare`."""
        if not self.is_unitary:
            raise UsageError("a schedule with measurements has no inverse")
        return Schedule(
            self.wires,
            self.global_qubits,
            self.finish,
            self.start,
            tuple(_undone(step) for step in reversed(self.steps)),
            ((),) * self.wires,
            weights=self.weights,
            features=self.features,
        )


Part = tuple[tuple[int, ...], Sequence[Operation]]  # the number of the segment on each tier, and its operations


def _levels(
    operations: Sequence[Operation], wires: int, outer: int, global_qubits: int
) -> tuple[list[Tier], list[Part]]:
    """The same partition at each level: what fits a node, and within that what fits a rank."""
    if not global_qubits:
        return [], [((), operations)]
    flat = outer in (0, global_qubits)
    full = cluster(operations, wires - (global_qubits if flat else outer), relabel=True)
    if flat:
        needed = tuple(frozenset(part.active) for part in full)
        return [Tier(0, global_qubits, needed)], [((number,), part.operations) for number, part in enumerate(full)]
    parts: list[Part] = []
    inner_needed: list[frozenset[int]] = []
    for number, part in enumerate(full):
        for inner in cluster(part.operations, wires - global_qubits, relabel=True):
            parts.append(((number, len(inner_needed)), inner.operations))
            inner_needed.append(frozenset(inner.active))
    needed = tuple(frozenset(part.active) for part in full)
    return [Tier(0, outer, needed), Tier(outer, global_qubits, tuple(inner_needed))], parts


Way = tuple[tuple[int, ...], tuple[Step, ...], tuple[int, ...]]  # wires by position before, the steps, wires after


def _cheapest(
    operations: Sequence[Operation],
    wires: int,
    outer: int,
    global_qubits: int,
    start: Sequence[int] | None,
    sweep: Sweep,
) -> Way:
    """As few exchanges as can be, with segments as they are or with fuller sweeps; or sweeps first, and exchanges
    between them. Where one sweep does a full segment there is no choice."""
    few = _paged(*_levels(operations, wires, outer, global_qubits), wires, start)
    axes = wires - global_qubits
    if not global_qubits or axes <= sweep.capacity + sweep.near:
        return few
    ways = [few, (few[0], tuple(postponed(few[1], wires, global_qubits, sweep)), few[2])]
    low = sweep.near + sweep.lanes
    if outer in (0, global_qubits) and axes - low - sweep.room(operations) >= global_qubits:
        layout = range(wires) if start is None else start
        clusters = sweep.cluster(operations, layout)
        needed = tuple(frozenset(each.active) for each in clusters)
        tier = Tier(0, global_qubits, needed, stay=frozenset(layout[wires - low :]), ahead=True)
        ways.append(
            _paged([tier], [((number,), each.operations) for number, each in enumerate(clusters)], wires, start)
        )
    return min(ways, key=lambda way: cost(way[1], wires, global_qubits, sweep))


def _paged(tiers: Sequence[Tier], parts: Sequence[Part], wires: int, start: Sequence[int] | None) -> Way:
    pages = Pages.fresh(wires, tiers) if start is None else Pages(start, tiers)
    begin = tuple(pages.wires)
    steps = tuple(_merged(_steps(parts, pages), parts[0][1] if parts else ()))
    return begin, steps, tuple(pages.wires)


def _steps(parts: Sequence[Part], pages: Pages) -> Iterator[Step]:
    for numbers, operations in parts:
        yield from pages.enter(numbers)
        position_of = [0] * len(pages.wires)
        for position, wire in enumerate(pages.wires):
            position_of[wire] = position
        for operation in operations:
            placed = operation.on(position_of)
            yield CircuitSegment((placed,)) if operation.is_unitary else Event(placed)


def _merged(steps: Iterator[Step], given: Sequence[Operation]) -> Iterator[Step]:
    """Neighbouring segments as one; `given` may be the operations of one."""
    run: ChunkedList[Operation] = ChunkedList()
    for step in steps:
        if isinstance(step, CircuitSegment):
            run.extend(step.operations)
            continue
        if run:
            yield CircuitSegment(shared(run, given))
            run = ChunkedList()
        yield step
    if run:
        yield CircuitSegment(shared(run, given))


def _finish(ready: LogicalQubits, end: Sequence[int]) -> tuple[int, ...]:
    wire_of = {qubit: wire for wire, qubit in enumerate(ready.ends)}
    return tuple(wire_of[qubit] for qubit in end)


def _undone(step: Step) -> Step:
    if isinstance(step, CircuitSegment):
        return CircuitSegment(tuple(operation.inverse() for operation in reversed(step.operations)))
    return step


def _in_order(operations: Sequence[Operation], global_qubits: int) -> int:
    return sum(
        1 for each in operations if each.is_unitary and min(mixed_wires(each), default=global_qubits) < global_qubits
    )


def _check_start(start: Sequence[int] | None, wires: int) -> None:
    if start is None:
        return
    if not isinstance(start, Sequence) or not all(map(is_index, start)) or sorted(start) != [*range(wires)]:
        raise UsageError(f"start={start!r}: expected the wire at each position, each of 0 to {wires - 1} once")


def _global_qubits(wires: int, ranks: int) -> int:
    if not is_index(ranks) or ranks < 1 or ranks & (ranks - 1):
        raise UsageError(f"{ranks!r} ranks: expected a power of two")
    global_qubits = ranks.bit_length() - 1
    if global_qubits > wires:
        raise UsageError(
            f"{ranks} ranks would hold {global_qubits} wires, but the circuit has {wires}; use {2**wires} or fewer"
        )
    return global_qubits
