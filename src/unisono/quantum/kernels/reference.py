"""The readable kernel: each operation on its own, in plain torch. The fast ones are tested against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from unisono.quantum.blocks import block
from unisono.quantum.gates import PauliRotation
from unisono.quantum.operation import Operation

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
    parts = [_controlled(local, operation, value) for value in range(len(matrix))]
    old = torch.stack([part.reshape(-1) for part in parts])
    new = torch.from_numpy(matrix).to(local) @ old
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
