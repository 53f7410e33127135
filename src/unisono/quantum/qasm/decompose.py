"""Explicit matrices and many controls in terms of named gates, for languages that have no others."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from unisono.quantum.circuit.gates import GATES, ArrayGate, Matrix, PauliRotation
from unisono.quantum.circuit.operation import Controls, Operation
from unisono.quantum.circuit.parameter import Affine

_SMALL = 1e-12


def euler(matrix: Matrix) -> tuple[float, float, float, float]:
    """(theta, phi, lam, phase) with matrix = exp(i phase) u3(theta, phi, lam)."""
    theta = 2 * math.atan2(abs(matrix[1, 0]), abs(matrix[0, 0]))
    if abs(matrix[0, 0]) > abs(matrix[1, 0]):
        phase = cmath.phase(matrix[0, 0])
        total = cmath.phase(matrix[1, 1]) - phase
        phi = cmath.phase(matrix[1, 0]) - phase if abs(matrix[1, 0]) > _SMALL else 0.0
        return theta, phi, total - phi, phase
    if abs(matrix[0, 0]) <= _SMALL:
        phase = cmath.phase(-matrix[0, 1])
        return theta, cmath.phase(matrix[1, 0]) - phase, 0.0, phase
    phase = cmath.phase(matrix[0, 0])
    return theta, cmath.phase(matrix[1, 0]) - phase, cmath.phase(-matrix[0, 1]) - phase, phase


def named(operation: Operation) -> list[Operation]:
    """The operation without explicit matrices and Pauli strings: u3, phases, and gates of the table under controls."""
    kind = operation.gate
    if isinstance(kind, PauliRotation):
        return [each for part in operation.lowered() for each in _parity_rotation(part)]
    if not isinstance(kind, ArrayGate):
        return [operation]
    if kind.diagonal:
        return _with_phases(operation, kind.entries())
    if kind.targets == 1:
        return _conditioned(_one_wire(operation.targets[0], operation.controls, kind.matrix()), operation)
    return two_level(operation)


def two_level(operation: Operation) -> list[Operation]:
    """A constant operation on k targets as rotations of two basis states each: one gate under k - 1 controls."""
    matrix = operation.matrix(operation.angles())
    rotations: list[tuple[int, int, Matrix]] = []
    for column in range(len(matrix)):
        for row in range(column + 1, len(matrix)):
            if abs(matrix[row, column]) > _SMALL:
                a, b = matrix[column, column], matrix[row, column]
                plane = np.array([[a.conjugate(), b.conjugate()], [b, -a]], dtype=np.complex128)
                plane /= math.hypot(abs(a), abs(b))
                matrix[[column, row]] = plane @ matrix[[column, row]]
                rotations.append((column, row, plane.conj().T))
    made = _with_phases(operation, np.diagonal(matrix))
    for column, row, plane in reversed(rotations):
        made += _plane(operation, column, row, plane)
    return made


def few_controls(operation: Operation) -> list[Operation]:
    """A constant operation on one target in terms of one control each, and Toffolis; up to a global phase."""
    flips = [Operation(GATES["x"], (wire,)) for wire, value in operation.controls if value == 0]
    wires = [wire for wire, _ in operation.controls]
    made = _few(operation.matrix(operation.angles()), wires, operation.targets[0])
    return _conditioned([*flips, *made, *flips], operation)


def _few(matrix: Matrix, controls: Sequence[int], target: int) -> list[Operation]:
    held = tuple((wire, 1) for wire in controls)
    if len(controls) <= 2 and np.allclose(matrix, GATES["x"].matrix(), atol=_SMALL):
        return [Operation(GATES["x"], (target,), held)]
    if len(controls) <= 1:
        *angles, phase = euler(matrix)
        made = [Operation(GATES["u3"], (target,), held, tuple(map(Affine, angles)))]
        return made + [Operation(GATES["p"], (wire,), (), (Affine(phase),)) for wire in controls if abs(phase) > _SMALL]
    *others, last = controls
    root = _root(matrix)
    toggle = _few(GATES["x"].matrix(), others, last)
    there, back = _few(root, [last], target), _few(root.conj().T, [last], target)
    return [*there, *toggle, *back, *toggle, *_few(root, others, target)]


def _root(matrix: Matrix) -> Matrix:
    """The principal square root of a 2 x 2 unitary."""
    theta, phi, lam, phase = euler(matrix)
    special = GATES["u3"].matrix(theta, phi, lam) * cmath.exp(-0.5j * (phi + lam))  # determinant one
    cos = special[0, 0].real
    if cos < -1 + _SMALL:  # minus the identity: any root of -1 commutes with it
        return 1j * cmath.exp(0.5j * (phase + (phi + lam) / 2)) * np.eye(2, dtype=np.complex128)
    root = (special + np.eye(2)) / math.sqrt(2 * (1 + cos))
    return root * cmath.exp(0.5j * (phase + (phi + lam) / 2))


def _parity_rotation(operation: Operation) -> list[Operation]:
    """exp(-i angle/2 Z...Z) as one rz between two chains of CNOTs; the chains need no controls."""
    if not isinstance(operation.gate, PauliRotation):
        return [operation]
    chain = [
        Operation(GATES["x"], (second,), ((first, 1),), condition=operation.condition)
        for first, second in zip(operation.targets, operation.targets[1:], strict=False)
    ]
    return [*chain, replace(operation, gate=GATES["rz"], targets=operation.targets[-1:]), *reversed(chain)]


def _with_phases(operation: Operation, entries: Matrix) -> list[Operation]:
    """A diagonal as a global phase under every pattern of its targets that has one."""
    made = []
    count = len(operation.targets)
    for index, entry in enumerate(entries):
        if abs(entry - 1) > _SMALL:
            pattern = _pattern(operation.targets, index, count)
            made.append(Operation(GATES["gphase"], (), (*operation.controls, *pattern), (Affine(cmath.phase(entry)),)))
    return _conditioned(made, operation)


def _one_wire(target: int, controls: Controls, matrix: Matrix) -> list[Operation]:
    *angles, phase = euler(matrix)
    made = [Operation(GATES["u3"], (target,), controls, tuple(map(Affine, angles)))]
    if abs(phase) > _SMALL:
        made.append(Operation(GATES["gphase"], (), controls, (Affine(phase),)))
    return made


def _plane(operation: Operation, column: int, row: int, plane: Matrix) -> list[Operation]:
    targets, count = operation.targets, len(operation.targets)
    bits = [(column >> (count - 1 - at) & 1, row >> (count - 1 - at) & 1) for at in range(count)]
    differing = next(at for at, (a, b) in enumerate(bits) if a != b)
    held = ((targets[differing], bits[differing][1]),)
    chain = [
        Operation(GATES["x"], (targets[at],), held) for at, (a, b) in enumerate(bits) if a != b and at != differing
    ]
    pattern = tuple((targets[at], bits[at][0]) for at in range(count) if at != differing)
    small = plane if bits[differing] == (0, 1) else plane[::-1, ::-1]
    made = [*chain, *_one_wire(targets[differing], (*operation.controls, *pattern), small), *reversed(chain)]
    return _conditioned(made, operation)


def _conditioned(made: Iterable[Operation], operation: Operation) -> list[Operation]:
    return [replace(each, condition=operation.condition) for each in made]


def _pattern(targets: Sequence[int], index: int, count: int) -> Controls:
    return tuple((target, index >> (count - 1 - at) & 1) for at, target in enumerate(targets))
