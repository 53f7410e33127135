"""Readout errors: bits that are read wrongly, independently of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unisono.errors import UsageError
from unisono.quantum.circuit.parameter import is_index


def readout_errors(given: Any, count: int, what: str) -> np.ndarray | None:
    """(count, 2) probabilities that a 0 is read as 1, and a 1 as 0; None where none was given.

    `given` is a probability, a pair of them, or a mapping from a wire or bit to either."""
    if given is None:
        return None
    errors = np.zeros((count, 2))
    if not isinstance(given, Mapping):
        errors[:] = _pair(given)
        return errors
    for index, each in given.items():
        if not is_index(index) or not 0 <= index < count:
            raise UsageError(f"readout error of {what} {index!r}: expected {what}s of 0 to {count - 1}")
        errors[int(index)] = _pair(each)
    return errors


def flipped(bits: torch.Tensor, errors: np.ndarray | None, draws: Sequence[np.random.Generator]) -> torch.Tensor:
    """The bits, (shots, count), as they are read; from one generator, or from one for each shot."""
    if errors is None:
        return bits
    given = bits.numpy()
    if len(draws) == 1:
        uniform = draws[0].random(given.shape)
    else:
        uniform = np.array([each.random(given.shape[1]) for each in draws]).reshape(given.shape)
    wrong = errors[np.arange(given.shape[1]), given]
    return torch.from_numpy(given ^ (uniform < wrong))


def confused(table: torch.Tensor, errors: np.ndarray | None) -> torch.Tensor:
    """Probabilities of readings, (2^count,), with readout errors."""
    if errors is None:
        return table
    for index, (up, down) in enumerate(errors):
        parts = table.view(1 << index, 2, -1)
        zero, one = parts[:, 0], parts[:, 1]
        table = torch.stack([zero * (1 - up) + one * down, zero * up + one * (1 - down)], dim=1).view(-1)
    return table


def _pair(given: Any) -> tuple[float, float]:
    try:
        values = (float(given),) * 2 if np.ndim(given) == 0 else tuple(map(float, given))
    except (TypeError, ValueError):
        values = ()
    if len(values) != 2 or not all(0 <= value <= 1 for value in values):
        raise UsageError(f"readout error {given!r}: expected a probability, or two: of 0 read as 1, and of 1 as 0")
    return values[0], values[1]
