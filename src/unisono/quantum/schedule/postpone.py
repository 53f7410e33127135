"""Operations that need not come before an exchange wait until after it, where they fill sweeps of the next segment.

A segment ends where ranks exchange, and its last sweep over memory is seldom full. Of its operations, only those that
mix a wire which is given away, and what these must follow, have to be done by then: sweeps are made until those are in,
with whatever else fits them. The rest joins the segment after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.quantum.circuit.commutation import mixed_wires
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.schedule.partition import Order, cluster_until
from unisono.quantum.schedule.step import CircuitSegment, Event, Exchange, Step
from unisono.quantum.schedule.sweeps import SWEEP, Sweep


def postponed(steps: Sequence[Step], wires: int, global_qubits: int, sweep: Sweep = SWEEP) -> list[Step]:
    """The same steps, but for operations that have moved past exchanges."""
    made: list[Step] = []
    waiting: list[Operation] = []
    for number, step in enumerate(steps):
        if not isinstance(step, CircuitSegment):
            if isinstance(step, Event) and waiting:
                made.append(CircuitSegment(tuple(waiting)))
                waiting = []
            made.append(step)
            continue
        ready, waiting = _parted([*waiting, *step.operations], _moved(steps[number + 1 :], wires), global_qubits, sweep)
        made.append(CircuitSegment(tuple(ready)))
    return [*made, CircuitSegment(tuple(waiting))] if waiting else made


def _moved(steps: Sequence[Step], wires: int) -> list[int]:
    """Where each position is after the exchanges that come first."""
    positions = list(range(wires))
    for step in steps:
        if not isinstance(step, Exchange):
            break
        partner = dict(zip((*step.give, *step.take), (*step.take, *step.give), strict=True))
        positions = [partner.get(place, place) for place in positions]
    return positions


def _parted(
    operations: Sequence[Operation], positions: Sequence[int], global_qubits: int, sweep: Sweep
) -> tuple[list[Operation], list[Operation]]:
    """What runs before the exchanges, and what waits, on the positions after them."""
    wires = len(positions)
    if list(positions) == list(range(wires)):
        return list(operations), []
    lanes, near = sweep.lowest(range(wires))
    bound = _bound(operations, positions, global_qubits)
    ready, waiting = cluster_until(
        operations, bound, sweep.room(operations), bundle=lanes, free=near | set(range(global_qubits))
    )
    return ready, [operation.on(positions) for operation in waiting]


def _bound(operations: Sequence[Operation], positions: Sequence[int], global_qubits: int) -> set[int]:
    """The numbers of the operations that cannot wait: they mix what is global now or later, or one that cannot wait
    must follow them."""
    last = len(operations) - 1
    backwards = operations[::-1]
    order = Order(backwards)
    bound = set()
    for number, operation in enumerate(backwards):
        stays = all(min(position, positions[position]) >= global_qubits for position in mixed_wires(operation))
        if stays and order.ready(number):
            order.finish(number)
        else:
            bound.add(last - number)
    return bound
