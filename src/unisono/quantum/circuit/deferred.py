"""Deferred measurement: a circuit that measures in the middle as a unitary circuit on more wires.

A measured wire that nothing mixes afterwards keeps its own outcome, and costs nothing. Otherwise its outcome is copied
to a spare wire by a CNOT before the next gate that mixes it. Gates under a condition on classical bits become gates
controlled by the wires that hold these bits; a reset swaps in a spare wire that is still |0>. With spare wires traced
out, the state is the mean over all outcomes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import gate
from unisono.quantum.circuit.operation import Controls, Operation


def deferred(circuit: Circuit, mixed_at_end: Iterable[int] = ()) -> Circuit:
    """The unitary circuit; spare wires follow the circuit's own.

    mixed_at_end: the wires of which something that is not diagonal is read at the end."""
    walk = _Deferral(circuit)
    for operation in circuit.operations:
        walk.add(operation)
    for wire in sorted(walk.measured & set(mixed_at_end)):
        walk.release(wire)
    made = Circuit(walk.wires)
    for operation in walk.operations:
        made.append(operation)
    return made


class _Deferral:
    def __init__(self, circuit: Circuit) -> None:
        self.wires = circuit.wires
        self.operations: list[Operation] = []
        self.wire_of_bit: dict[int, int] = {}  # of bits that were measured; the others are 0
        self.measured: set[int] = set()  # wires that nothing has mixed since they were measured

    def add(self, operation: Operation) -> None:
        held = {self.wire_of_bit.get(bit) for bit, _ in operation.condition}
        for wire in self.measured.intersection(operation.targets):
            if operation.gate.unitary:
                mixed = not operation.is_diagonal or wire in held
            else:
                mixed = operation.name == "reset" and bool(operation.condition)
            if mixed:
                self.release(wire)
        controls = self._controls(operation.condition)
        if controls is None or operation.name == "barrier":
            return
        if operation.name == "measure":
            self._measure(operation, controls)
        elif operation.name == "reset":
            self._reset(operation.targets[0], controls)
        elif operation.name == "unfinished":
            raise UsageError("a 'while' on measured bits has no unitary form; use shots, or uq.measured")
        elif not operation.gate.unitary:
            raise UsageError(f"{operation} is a channel: its circuit has no unitary form; use shots or a DensityState")
        else:
            self._apply(replace(operation, condition=()), controls)

    def release(self, wire: int) -> None:
        """Copy a measured wire's outcome to a spare wire, so that the wire may be mixed."""
        spare = self._spare()
        self.operations.append(Operation(gate("x"), (spare,), ((wire, 1),)))
        self._move_bits(wire, spare)

    def _measure(self, operation: Operation, controls: Controls) -> None:
        (wire,), (bit,) = operation.targets, operation.bits
        if not controls:
            self.wire_of_bit[bit] = wire
            self.measured.add(wire)
            return
        spare, before = self._spare(), self.wire_of_bit.get(bit)
        if before is not None:  # the bit keeps its value where the condition does not hold
            self._apply(Operation(gate("x"), (spare,), ((before, 1),)), ())
            self._apply(Operation(gate("x"), (spare,), ((before, 1),)), controls)
        self._apply(Operation(gate("x"), (spare,), ((wire, 1),)), controls)
        self.wire_of_bit[bit] = spare

    def _reset(self, wire: int, controls: Controls) -> None:
        spare = self._spare()
        self._apply(Operation(gate("swap"), (wire, spare)), controls)
        if not controls:
            self._move_bits(wire, spare)

    def _apply(self, operation: Operation, controls: Controls) -> None:
        """Add an operation under further controls; one whose controls contradict each other never happens."""
        values = dict(controls)
        if all(values.setdefault(wire, value) == value for wire, value in operation.controls):
            self.operations.append(replace(operation, controls=tuple(values.items())))

    def _controls(self, condition: Controls) -> Controls | None:
        """The wires that hold the bits of a condition, with their values; None where it never holds."""
        values: dict[int, int] = {}
        for bit, value in condition:
            wire = self.wire_of_bit.get(bit)
            if wire is None:
                if value:
                    return None
            elif values.setdefault(wire, value) != value:
                return None
        return tuple(values.items())

    def _move_bits(self, wire: int, spare: int) -> None:
        self.measured.discard(wire)
        for bit, held_by in self.wire_of_bit.items():
            if held_by == wire:
                self.wire_of_bit[bit] = spare

    def _spare(self) -> int:
        self.wires += 1
        return self.wires - 1
