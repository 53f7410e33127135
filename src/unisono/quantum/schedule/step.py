"""The steps of a schedule: pure data, read alike by the plan, by the state that runs it and by the gradient.

Note: positions. The physical index of an amplitude has n bits; position 0 is the most significant. The first g
positions are the *global* bits, which a rank has in common for all its amplitudes; the others are the axes of its local
array, axis a = position - g, axis 0 the most significant. A global index h belongs to the rank r with holds[r] == h:
permuting gates on global positions only change that table, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.quantum.circuit.operation import Operation


@dataclass(frozen=True)
class Exchange:
    """Position give[i] and position take[i] are exchanged, all at once: one all-to-all among 2^k ranks.

    It is its own inverse. `take` are global positions; `give` are local ones, or global ones of the same node."""

    give: tuple[int, ...]
    take: tuple[int, ...]


@dataclass(frozen=True)
class CircuitSegment:
    """Unitary operations, on positions, that need no exchange: each is diagonal, or a control, on the global positions
    it touches, or permutes global positions only."""

    operations: Sequence[Operation]


@dataclass(frozen=True)
class Event:
    """A measurement, a reset, a channel or a gate that depends on a measured bit, on positions: decided as it runs."""

    operation: Operation


@dataclass(frozen=True)
class Tile:
    """One sweep over a rank's memory: the operations mix only `active` axes, and are diagonal or controls elsewhere."""

    active: tuple[int, ...]
    operations: tuple[Operation, ...]


Step = Exchange | CircuitSegment | Event
