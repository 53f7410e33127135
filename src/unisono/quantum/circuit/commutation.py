"""What an operation does to each of its wires, and so what it commutes with.

An operation has a Pauli for each wire: Z where it is diagonal (a control, a phase), X or Y where it only mixes along
that axis (the target of a CNOT, a rotation), * where it does anything else. Operations whose Paulis agree, and are no
*, on every wire they share commute: on those wires both live in one commutative algebra.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from unisono.quantum.circuit.gates import ArrayGate, Gate, PauliRotation, pauli_matrix
from unisono.quantum.circuit.operation import Operation

_PAULIS = {
    "x": "X",
    "sx": "X",
    "sxdg": "X",
    "rx": "X",
    "y": "Y",
    "ry": "Y",
    "rxx": "XX",
    "ryy": "YY",
    "rzx": "ZX",
}
_LARGEST_LOOK = 6  # targets of an explicit unitary whose Paulis are found by looking at its matrix


def wire_paulis(operation: Operation) -> tuple[str, ...]:
    """A Pauli of X, Y, Z, * for each of operation.wires."""
    return ("Z",) * len(operation.controls) + gate_paulis(operation.gate)[: len(operation.targets)]


def mixed_wires(operation: Operation) -> tuple[int, ...]:
    """The wires on which the operation is not diagonal: those that a rank must hold to apply it."""
    return tuple(w for w, letter in zip(operation.wires, wire_paulis(operation), strict=True) if letter != "Z")


@lru_cache(maxsize=4096)
def gate_paulis(gate: Gate) -> tuple[str, ...]:
    if gate.diagonal or gate.name in ("measure", "unfinished"):
        return ("Z",) * gate.targets
    if isinstance(gate, PauliRotation):
        return tuple(gate.paulis)
    if gate.name in _PAULIS:
        return tuple(_PAULIS[gate.name])
    if isinstance(gate, ArrayGate) and gate.targets <= _LARGEST_LOOK:
        return tuple(_seen_pauli(gate.matrix(), target, gate.targets) for target in range(gate.targets))
    return ("*",) * gate.targets


@lru_cache(maxsize=4096)
def moves(gate: Gate) -> tuple[tuple[int, complex], ...] | None:
    """For a gate that only permutes basis states and gives them phases: where each goes, and its phase; else None."""
    if gate.parameters or not gate.unitary or gate.diagonal or gate.targets > _LARGEST_LOOK:
        return None
    matrix = gate.matrix()
    if (np.abs(matrix) > 1e-12).sum() != len(matrix) or np.abs(np.abs(matrix).max(axis=0) - 1).max() > 1e-12:
        return None
    rows = np.abs(matrix).argmax(axis=0)
    return tuple((int(row), complex(matrix[row, column])) for column, row in enumerate(rows))


def _seen_pauli(matrix: np.ndarray, target: int, targets: int) -> str:
    for letter in "ZXY":
        pauli = pauli_matrix("I" * target + letter + "I" * (targets - target - 1))
        if np.abs(matrix @ pauli - pauli @ matrix).max() < 1e-12:
            return letter
    return "*"
