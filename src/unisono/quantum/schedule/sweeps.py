"""Sweeps over a rank's memory as the scheduler sees them: what one can mix, and what steps cost, counted in sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unisono.quantum.circuit.commutation import mixed_wires
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.schedule.partition import Cluster, cluster
from unisono.quantum.schedule.step import CircuitSegment, Exchange, Step, Tile

_EXCHANGE = 5.0  # sweeps that sending all of a rank's amplitudes may cost


@dataclass(frozen=True)
class Sweep:
    """`capacity` axes beside `near` low ones, which lie above the lowest `lanes`; these all together or not at all.

    It is that of the CPU kernel in complex64 (compile/compiled.py); those of others are about as large."""

    capacity: int = 9
    near: int = 3
    lanes: int = 3

    def room(self, operations: Iterable[Operation]) -> int:
        """The capacity that the widest of some operations asks for."""
        widest = max((len(mixed_wires(operation)) for operation in operations), default=0)
        return max(self.capacity, widest + self.lanes)

    def lowest(self, wires: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Of wires in the order of positions: those that are lanes, and those that are near."""
        lanes = len(wires) - self.lanes
        return frozenset(wires[lanes:]), frozenset(wires[lanes - self.near : lanes])

    def cluster(self, operations: Sequence[Operation], wires: Sequence[int], global_qubits: int = 0) -> list[Cluster]:
        """Operations, on wires in the order of positions, as sweeps; the first `global_qubits` need no room."""
        lanes, near = self.lowest(wires)
        return cluster(operations, self.room(operations), bundle=lanes, free=near | set(wires[:global_qubits]))


SWEEP = Sweep()


def cost(steps: Iterable[Step], wires: int, global_qubits: int, sweep: Sweep = SWEEP) -> float:
    """Of all steps, in sweeps."""
    total = 0.0
    for step in steps:
        if isinstance(step, CircuitSegment):
            total += len(sweep.cluster(step.operations, range(wires), global_qubits))
        elif isinstance(step, Exchange):
            local = sum(give >= global_qubits for give in step.give)
            total += _EXCHANGE * (1 - 0.5**local)
    return total


def tiles(
    operations: Sequence[Operation], capacity: int, bundle: Iterable[int] = (), free: Iterable[int] = ()
) -> list[Tile]:
    """One rank's operations, on its axes, partitioned into sweeps that mix at most `capacity` axes each; those of
    `bundle` all together or not at all, and those that are `free` besides."""
    clusters = cluster(operations, capacity, bundle=frozenset(bundle), free=frozenset(free))
    return [Tile(tuple(sorted(each.active)), tuple(each.operations)) for each in clusters]
