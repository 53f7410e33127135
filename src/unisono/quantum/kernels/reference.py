"""The readable kernel: each operation on its own, in plain torch. The fast ones are tested against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unisono.quantum.circuit.gates import PauliRotation
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Affine

_WIDEST_MATRIX = 4  # targets; wider Pauli rotations are taken apart


def run(local: torch.Tensor, operations: Sequence[Operation], weights: Any = (), features: Any = ()) -> None:
    """Apply operations on axes to a local array of 2^m amplitudes, in place; axis 0 is the most significant bit."""
    for operation in operations:
        wide = isinstance(operation.gate, PauliRotation) and operation.gate.targets > _WIDEST_MATRIX
        for part in operation.lowered() if wide else (operation,):
            angles = [float(angle) for angle in part.angles(weights, features)]
            if part.is_diagonal:
                _scale(local, part, part.entries(angles))
            else:
                _mix(local, part, part.matrix(angles))


def _mix(local: torch.Tensor, operation: Operation, matrix: np.ndarray) -> None:
    _combine([_controlled(local, operation, value) for value in range(len(matrix))], matrix)


def apply_matrix(local: torch.Tensor, axes: Sequence[int], matrix: np.ndarray) -> None:
    """Any matrix on some axes of a local array, in place."""
    _combine([block(local, axes, value) for value in range(len(matrix))], matrix)


def _combine(parts: Sequence[torch.Tensor], matrix: np.ndarray) -> None:
    old = torch.stack([part.reshape(-1) for part in parts])
    new = torch.from_numpy(matrix).to(parts[0]) @ old
    for part, amplitudes in zip(parts, new, strict=True):
        part.copy_(amplitudes.view(part.shape))


def _scale(local: torch.Tensor, operation: Operation, entries: np.ndarray) -> None:
    for value, entry in enumerate(entries):
        if entry != 1:
            _controlled(local, operation, value).mul_(complex(entry))


def _controlled(local: torch.Tensor, operation: Operation, value: int) -> torch.Tensor:
    """The view of the amplitudes whose controls are right and whose targets read `value`."""
    prefix = 0
    for _, bit in operation.controls:
        prefix = prefix << 1 | bit
    return block(local, operation.wires, prefix << len(operation.targets) | value)


def reverse(
    local: torch.Tensor, costate: torch.Tensor, operations: Sequence[Operation], weights: Any = (), features: Any = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Undo the operations on a state and a co-state, in place; the gradients of weights and of features.

    With U' the derivative of an operation U and psi the state before it, its angle has the gradient
    2 Re <costate|U' psi>."""
    found = np.zeros(np.size(weights)), np.zeros(np.size(features))
    for operation in reversed(operations):
        angles = [float(angle) for angle in operation.angles(weights, features)]
        undo = [operation.inverse()]
        run(local, undo, weights, features)
        for which, parameter in enumerate(operation.parameters):
            if not parameter.is_constant:
                moved = _derived(local, operation, which, angles)
                slope = 2 * float(torch.vdot(costate, moved).real)
                for total, terms in zip(found, (parameter.weights, parameter.features), strict=True):
                    for index, factor in terms:
                        total[index] += factor * slope
        run(costate, undo, weights, features)
    return found


def _derived(local: torch.Tensor, operation: Operation, which: int, angles: list[float]) -> torch.Tensor:
    """U' psi: zero where the controls do not hold."""
    moved = torch.zeros_like(local)
    if isinstance(operation.gate, PauliRotation):  # half of the same rotation, by pi more
        half = local.clone()
        shifted = replace(operation, parameters=(Affine(angles[0] + math.pi),))
        run(half, [shifted])
        acting = replace(operation, targets=())
        _controlled(moved, acting, 0).copy_(_controlled(half, acting, 0) / 2)
        return moved
    matrix = torch.from_numpy(operation.derivative(which, angles)).to(local)
    old = torch.stack([_controlled(local, operation, value).reshape(-1) for value in range(len(matrix))])
    for value, amplitudes in enumerate(matrix @ old):
        part = _controlled(moved, operation, value)
        part.copy_(amplitudes.view(part.shape))
    return moved


class ReferenceRunner:
    """Operations for this kernel, called as those of the fast ones are."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations

    def __call__(self, local: torch.Tensor, weights: Any = (), features: Any = ()) -> None:
        run(local, self.operations, weights, features)

    def reverse(
        self, local: torch.Tensor, costate: torch.Tensor, weights: Any = (), features: Any = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        return reverse(local, costate, self.operations, weights, features)


def block(local: torch.Tensor, axes: Sequence[int], value: int) -> torch.Tensor:
    """The part of a local array where `axes` read `value` (first axis most significant): a view of few dimensions."""
    bits = {axis: value >> (len(axes) - 1 - number) & 1 for number, axis in enumerate(axes)}
    shape: list[int] = []
    index: list[int | slice] = []
    past = 0
    for axis in sorted(bits):
        shape += [2 ** (axis - past), 2]
        index += [slice(None), bits[axis]]
        past = axis + 1
    return local.view(*shape, -1)[tuple(index)]


def flipped(amplitudes: torch.Tensor, mask: int) -> torch.Tensor:
    """amplitudes[i ^ mask], for all i: bits that are flipped become dimensions to reverse."""
    shape, dims, run = [], [], 1
    for bit in reversed(range(len(amplitudes).bit_length() - 1)):
        if mask >> bit & 1:
            shape += [run, 2]
            dims.append(len(shape) - 1)
            run = 1
        else:
            run *= 2
    return amplitudes.view(*shape, run).flip(dims).reshape(-1) if mask else amplitudes
