"""Which global index each rank has, and what an operation becomes on a rank that knows its bits of the global qubits.

On rank r, whose g global qubits read table[r]:
a phase or control on global qubits        becomes the phase or control with those bits put in
X, CNOT, SWAP, Toffoli on global qubits    change the table, for every rank: no amplitude moves
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.circuit.commutation import moves, wire_paulis
from unisono.quantum.circuit.gates import Gate, PauliRotation, diagonal, gate, pauli_rotation, unitary
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Affine

_ROTATION_PAULIS = {"rz": "Z", "rzz": "ZZ", "rzx": "ZX"}
_AXIS = {"X": "rx", "Y": "ry", "Z": "rz"}


class GlobalIndexMap:
    """The table rank -> global index of 2^g ranks."""

    def __init__(self, global_qubits: int, table: NDArray[np.int64] | None = None) -> None:
        self.global_qubits = global_qubits  # how many positions
        self.table = np.arange(2**global_qubits, dtype=np.int64) if table is None else table.copy()

    def copy(self) -> GlobalIndexMap:
        return GlobalIndexMap(self.global_qubits, self.table)

    def rank_of(self, index: int) -> int:
        """The rank that has a global index."""
        return int(np.flatnonzero(self.table == index)[0])

    def bit(self, rank: int, position: int) -> int:
        return int(self.table[rank]) >> (self.global_qubits - 1 - position) & 1

    def restrict(self, operations: Iterable[Operation], rank: int) -> list[Operation]:
        """What the operations, on positions, are for one rank: operations on its local axes.

        Operations that permute global indices change the table, for all ranks, as they pass."""
        if not self.global_qubits:
            return list(operations)
        local = []
        for operation in operations:
            if self.is_move(operation):
                local.extend(self._phase_of_move(operation, rank))
                self.move(operation)
            else:
                local.extend(self._restricted(operation, rank))
        return local

    def is_move(self, operation: Operation) -> bool:
        """Whether the operation permutes global indices, all of its wires being global."""
        wires = operation.wires
        return bool(wires) and max(wires) < self.global_qubits and not operation.is_diagonal

    def move(self, operation: Operation, *, undo: bool = False) -> None:
        found = self._moves_of(operation)
        after = self.table.copy()
        acts = self._acting(operation, self.table)
        before = self._gather(self.table, operation.targets)
        new = np.array([row for row, _ in found])
        if undo:
            new = np.argsort(new)
        values = new[before]
        for number, target in enumerate(reversed(operation.targets)):
            shift = self.global_qubits - 1 - target
            after = (after & ~(1 << shift)) | ((values >> number & 1) << shift)
        self.table = np.where(acts, after, self.table)

    def _phase_of_move(self, operation: Operation, rank: int) -> list[Operation]:
        mine = self.table[rank : rank + 1]
        if not self._acting(operation, mine)[0]:
            return []
        _, phase = self._moves_of(operation)[int(self._gather(mine, operation.targets)[0])]
        return _phase(cmath.phase(phase)) if phase != 1 else []

    def _moves_of(self, operation: Operation) -> tuple[tuple[int, complex], ...]:
        found = moves(operation.gate)
        if found is None:
            raise AssertionError(f"{operation} mixes global positions; the schedule exchanges them first")
        return found

    def _acting(self, operation: Operation, table: NDArray[np.int64]) -> NDArray[np.bool_]:
        acts = np.ones(len(table), dtype=bool)
        for position, value in operation.controls:
            acts &= (table >> (self.global_qubits - 1 - position) & 1) == value
        return acts

    def _gather(self, table: NDArray[np.int64], positions: Sequence[int]) -> NDArray[np.int64]:
        bits = np.zeros(len(table), dtype=np.int64)
        for position in positions:
            bits = bits << 1 | (table >> (self.global_qubits - 1 - position) & 1)
        return bits

    def _restricted(self, operation: Operation, rank: int) -> list[Operation]:
        controls = []
        for position, value in operation.controls:
            if position >= self.global_qubits:
                controls.append((position - self.global_qubits, value))
            elif self.bit(rank, position) != value:
                return []
        fixed = {
            number: self.bit(rank, position)
            for number, position in enumerate(operation.targets)
            if position < self.global_qubits
        }
        targets = tuple(
            position - self.global_qubits for position in operation.targets if position >= self.global_qubits
        )
        reduced = _put_in(operation, fixed) if fixed else (operation.gate, operation.parameters)
        if reduced is None:
            return []
        kind, parameters = reduced
        return [replace(operation, gate=kind, targets=targets, controls=tuple(controls), parameters=parameters)]


def _put_in(operation: Operation, fixed: dict[int, int]) -> tuple[Gate, tuple[Affine, ...]] | None:
    """The gate that is left when the bits of targets on which it is diagonal are known; None: nothing is left."""
    kind, parameters = operation.gate, operation.parameters
    gate_wires = wire_paulis(operation)[len(operation.controls) :]
    if any(gate_wires[number] != "Z" for number in fixed):
        raise AssertionError(f"{operation} mixes global positions; the schedule exchanges them first")
    pauli_string = kind.paulis if isinstance(kind, PauliRotation) else _ROTATION_PAULIS.get(kind.name)
    if pauli_string is not None:
        sign = -1.0 if sum(fixed.values()) % 2 else 1.0
        rest = "".join(pauli for number, pauli in enumerate(pauli_string) if number not in fixed)
        if not rest:
            return gate("gphase"), (parameters[0] * (-0.5 * sign),)
        return gate(_AXIS[rest]) if len(rest) == 1 else pauli_rotation(rest), (parameters[0] * sign,)
    if kind.name == "p":
        return (gate("gphase"), parameters) if fixed[0] else None
    return _sliced(kind, fixed)


def _sliced(kind: Gate, fixed: dict[int, int]) -> tuple[Gate, tuple[Affine, ...]] | None:
    """The same for a gate without parameters, from its entries or its matrix."""
    index = tuple(fixed.get(number, slice(None)) for number in range(kind.targets))
    left = kind.targets - len(fixed)
    if kind.diagonal:
        array = kind.entries().reshape((2,) * kind.targets)[index]
    else:
        array = kind.matrix().reshape((2,) * (2 * kind.targets))[index + index]
    if not left:
        angle = cmath.phase(complex(array))
        return (gate("gphase"), (Affine(angle),)) if angle else None
    return diagonal(array.reshape(-1)) if kind.diagonal else unitary(array.reshape(2**left, 2**left)), ()


def _phase(angle: float) -> list[Operation]:
    return [Operation(gate("gphase"), (), parameters=(Affine(math.remainder(angle, 2 * math.pi)),))]
