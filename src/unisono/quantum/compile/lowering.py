"""Operations in terms of what kernels do: rotations, phases, flips and, rarely, dense matrices.

    Rotation  exp(-i angle Y / 2) on one axis, under controls: real, the only thing that mixes amplitudes
    Phase     a diagonal: amplitudes are multiplied by exp(i ...), whatever the number of axes
    Flip      X or CNOT: amplitudes move, and kernels only rename them
    Dense     an explicit unitary on two or more axes

Every gate with parameters becomes rotations and phases whose angles are affine in those parameters, so that all
gradients follow from rotations and phases alone.
"""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass, replace

import numpy as np

from unisono.errors import UsageError
from unisono.quantum.circuit.gates import ArrayGate, Gate, PauliRotation
from unisono.quantum.circuit.operation import Controls, Operation
from unisono.quantum.circuit.parameter import Affine

HALF_PI = math.pi / 2
NONE = Affine()


@dataclass(frozen=True)
class Rotation:
    target: int
    controls: Controls
    angle: Affine


@dataclass(frozen=True)
class Phase:
    """exp(i (constants[x] + slopes[x] * angle)) where the controls hold; the bits of x, first most significant, are the
    parities of groups of axes."""

    controls: Controls
    parities: tuple[tuple[int, ...], ...]
    constants: tuple[float, ...]
    slopes: tuple[float, ...] = ()
    angle: Affine = NONE


@dataclass(frozen=True)
class Flip:
    target: int
    control: int | None = None


@dataclass(frozen=True, eq=False)
class Dense:
    targets: tuple[int, ...]
    controls: Controls
    matrix: np.ndarray


Primitive = Rotation | Phase | Flip | Dense

_CONSTANT_PHASES = {"z": math.pi, "s": HALF_PI, "sdg": -HALF_PI, "t": HALF_PI / 2, "tdg": -HALF_PI / 2}
_ROTATION_PAULIS = {"rx": "X", "ry": "Y", "rz": "Z", "rxx": "XX", "ryy": "YY", "rzz": "ZZ", "rzx": "ZX"}


def lower(operation: Operation) -> list[Primitive]:
    """The primitives of a unitary operation, first to last."""
    kind, controls, targets = operation.gate, operation.controls, operation.targets
    pauli_string = kind.paulis if isinstance(kind, PauliRotation) else _ROTATION_PAULIS.get(kind.name)
    if pauli_string is not None:
        return _pauli_rotation(pauli_string, targets, controls, operation.parameters[0])
    if kind.diagonal:
        return _diagonal(operation)
    if isinstance(kind, ArrayGate) or kind.name not in _FIXED_OR_EULER:
        return _explicit(kind, targets, controls, operation)
    return _FIXED_OR_EULER[kind.name](operation)


def _pauli_rotation(pauli_string: str, targets: tuple[int, ...], controls: Controls, angle: Affine) -> list[Primitive]:
    """exp(-i angle P / 2): CNOT, CZ and S map P to Y on one axis, and back."""
    by_wire = dict(zip(targets, pauli_string, strict=True))
    mixed = [target for target in targets if by_wire[target] != "Z"]
    if not mixed:
        return [Phase(controls, (targets,), (0.0, 0.0), (-0.5, 0.5), angle)]
    pivot, *others = mixed
    zs = [target for target in targets if by_wire[target] == "Z"]
    before: list[Primitive] = [_s(target, -1) for target in others if by_wire[target] == "Y"]
    before += [Phase((), ((pivot,), (z,)), (0.0, 0.0, 0.0, math.pi)) for z in zs]
    before += [Flip(target, pivot) for target in others]
    if by_wire[pivot] == "X":
        before.append(_s(pivot, 1))
    after = [_undone(step) for step in before if not _is_pivot_s(step, pivot)]
    if by_wire[pivot] == "X":
        after.append(_s(pivot, -1))
    return [*before, Rotation(pivot, controls, angle), *reversed(after)]


def _s(axis: int, sign: int) -> Phase:
    return Phase((), ((axis,),), (0.0, sign * HALF_PI))


def _undone(step: Primitive) -> Primitive:
    """CNOT and CZ undo themselves; S has an inverse."""
    if isinstance(step, Phase) and len(step.parities) == 1:
        return replace(step, constants=tuple(-angle for angle in step.constants))
    return step


def _is_pivot_s(step: Primitive, pivot: int) -> bool:
    return isinstance(step, Phase) and step.parities == ((pivot,),)


def _diagonal(operation: Operation) -> list[Primitive]:
    kind, controls, targets = operation.gate, operation.controls, operation.targets
    parities = tuple((target,) for target in targets)
    if kind.name == "id":
        return []
    if kind.name == "p":
        return [Phase(controls, parities, (0.0, 0.0), (0.0, 1.0), operation.parameters[0])]
    if kind.name == "gphase":
        return [Phase(controls, (), (0.0,), (1.0,), operation.parameters[0])]
    if kind.name in _CONSTANT_PHASES:
        return [Phase(controls, parities, (0.0, _CONSTANT_PHASES[kind.name]))]
    if operation.parameters:
        raise UsageError(f"{operation}: no rule for this diagonal gate with parameters")
    return [Phase(controls, parities, tuple(float(angle) for angle in np.angle(operation.entries())))]


def _euler(operation: Operation, left: Affine, angle: Affine, right: Affine, shared: float = 0.0) -> list[Primitive]:
    """exp(i shared) P(left) RY(angle) P(right)"""
    (target,) = operation.targets
    controls, axis = operation.controls, ((target,),)
    made: list[Primitive] = [Phase(controls, axis, (0.0, 0.0), (0.0, 1.0), right)]
    made.append(Rotation(target, controls, angle))
    made.append(Phase(controls, axis, (shared, shared), (0.0, 1.0), left))
    return made


def _rot(operation: Operation) -> list[Primitive]:
    first, middle, last = operation.parameters
    (target,) = operation.targets
    controls, axis = operation.controls, ((target,),)
    return [
        Phase(controls, axis, (0.0, 0.0), (-0.5, 0.5), first),
        Rotation(target, controls, middle),
        Phase(controls, axis, (0.0, 0.0), (-0.5, 0.5), last),
    ]


def _x(operation: Operation) -> list[Primitive]:
    """X under at most one control renames; under more, it is a rotation by pi after a sign."""
    (target,) = operation.targets
    if len(operation.controls) > 1:
        sign = Phase(operation.controls, ((target,),), (0.0, math.pi))
        return [sign, Rotation(target, operation.controls, Affine(math.pi))]
    if not operation.controls:
        return [Flip(target)]
    ((control, value),) = operation.controls
    return [Flip(target, control)] if value else [Flip(target, control), Flip(target)]


def _y(operation: Operation) -> list[Primitive]:
    """Y = i X Z"""
    (target,) = operation.targets
    before = Phase(operation.controls, ((target,),), (HALF_PI, HALF_PI + math.pi))
    return [before, *_x(operation)]


def _h(operation: Operation) -> list[Primitive]:
    (target,) = operation.targets
    sign = Phase(operation.controls, ((target,),), (0.0, math.pi))
    return [sign, Rotation(target, operation.controls, Affine(HALF_PI))]


def _root_x(operation: Operation, sign: int) -> list[Primitive]:
    """The root of X is a rotation by pi/2 about X, times an eighth root of one."""
    (target,) = operation.targets
    return [
        _s(target, 1),
        Rotation(target, operation.controls, Affine(sign * HALF_PI)),
        _s(target, -1),
        Phase(operation.controls, (), (sign * HALF_PI / 2,)),
    ]


def _swap(operation: Operation, phase: float = 0.0) -> list[Primitive]:
    first, second = operation.targets
    made: list[Primitive] = [Flip(first, second)]
    middle = Operation(operation.gate, (second,), (*operation.controls, (first, 1)))
    made += _x(middle)
    made.append(Flip(first, second))
    if phase:
        made.append(Phase(operation.controls, ((first,), (second,)), (0.0, phase, phase, 0.0)))
    return made


def _explicit(kind: Gate, targets: tuple[int, ...], controls: Controls, operation: Operation) -> list[Primitive]:
    if operation.parameters:
        raise UsageError(f"{operation}: no rule for this gate with parameters")
    matrix = operation.matrix()
    if len(targets) > 1:
        return [Dense(targets, controls, matrix)]
    angle = 2 * math.atan2(abs(matrix[1, 0]), abs(matrix[0, 0]))
    shared = cmath.phase(matrix[0, 0]) if abs(matrix[0, 0]) > 1e-8 else 0.0
    if abs(matrix[1, 0]) > 1e-8:
        left = cmath.phase(matrix[1, 0]) - shared
        right = cmath.phase(-matrix[0, 1]) - shared
    else:
        left, right = cmath.phase(matrix[1, 1]) - shared, 0.0
    return _euler(operation, Affine(left), Affine(angle), Affine(right), shared)


_FIXED_OR_EULER = {
    "x": _x,
    "y": _y,
    "h": _h,
    "sx": lambda operation: _root_x(operation, 1),
    "sxdg": lambda operation: _root_x(operation, -1),
    "swap": _swap,
    "iswap": lambda operation: _swap(operation, HALF_PI),
    "iswapdg": lambda operation: _swap(operation, -HALF_PI),
    "rot": _rot,
    "u2": lambda op: _euler(op, op.parameters[0], Affine(HALF_PI), op.parameters[1]),
    "u3": lambda op: _euler(op, op.parameters[1], op.parameters[0], op.parameters[2]),
}
