"""Recognises definitions of gates that we have ourselves: one operation runs faster than the gates that define it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from unisono.quantum.circuit.gates import GATES, Matrix
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Affine
from unisono.quantum.qasm.catalogue import FILES, Known
from unisono.quantum.qasm.scope import Definition

NATIVE = {name: Known(name, 0, gate.parameters, gate.targets) for name, gate in GATES.items() if gate.unitary}
NATIVE |= {name: known for name, known in FILES["qelib1.inc"].items() if not known.special}
_SAMPLES = ((0.5, 0.8, -1.3), (-2.1, 1.7, 0.4))  # angles at which the matrices are compared

_MOST_COMPARED = 512  # operations
Expand = Callable[[list[Affine], list[int]], list[Operation]]


def native(definition: Definition, expand: Expand) -> Known | Definition:
    """Our own gate where the definition's name and matrix are those of one; otherwise the definition.

    Expanding the body for the comparison is also what finds its errors."""
    wires = list(range(len(definition.operands)))
    found = NATIVE.get(definition.name)
    same = found is not None and (found.parameters, found.operands) == (len(definition.parameters), len(wires))
    for sample in _SAMPLES:
        angles = [Affine(sample[index % 3]) for index in range(len(definition.parameters))]
        made = expand(angles, wires)
        if not same or found is None or len(made) > _MOST_COMPARED:
            return definition
        controls = tuple((wire, 1) for wire in wires[: found.controls])
        own = Operation(GATES[found.name], tuple(wires[found.controls :]), controls, tuple(angles))
        left, right = (_matrix(each, len(wires)) for each in (made, [own]))
        if definition.version == 2:  # no way to see a global phase in OpenQASM 2
            left = left * np.exp(1j * (np.angle(np.vdot(left, right))))
        same = bool(np.allclose(left, right, atol=1e-9))
    return found if same and found is not None else definition


def _matrix(operations: list[Operation], n: int) -> Matrix:
    total = np.eye(2**n, dtype=np.complex128).reshape([2] * n + [2**n])
    for each in operations:
        k = len(each.wires)
        matrix = each.full_matrix(each.angles()).reshape([2] * (2 * k))
        total = np.tensordot(matrix, total, axes=(range(k, 2 * k), each.wires))
        total = np.moveaxis(total, range(k), each.wires)
    return total.reshape(2**n, 2**n)
