"""Pauli sums on a state that one GPU holds: their values, and what they make of the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.quantum.distributed.memory import zeros_like
from unisono.quantum.kernels.gpu import THREADS, TOGETHER, kernel_of, real_of
from unisono.quantum.observables.observable import PauliString, PauliSum

_BLOCKS = 8  # of a multiprocessor


class GpuPauliStrings:
    """Words of several observables on the wires of a layout (position 0 most significant)."""

    def __init__(self, observables: Sequence[PauliSum], layout: Sequence[int]) -> None:
        self.observables = len(observables)
        self.bits = len(layout)
        bit_of = {wire: self.bits - 1 - position for position, wire in enumerate(layout)}
        self._terms = [
            (number, *_masks(pauli_string, bit_of), coefficient)
            for number, observable in enumerate(observables)
            for coefficient, pauli_string in observable.paulis().terms
        ]

    def values(self, local: torch.Tensor) -> NDArray[np.float64]:
        """The expectation of each observable."""
        owners, groups = self._groups({}, merged=False)
        found = self._call(groups, local, None)
        return np.bincount(owners, found, minlength=self.observables).astype(np.float64)

    def applied(self, local: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        """(sum of weight * observable) |local>."""
        made = zeros_like(local)
        _, groups = self._groups(dict(enumerate(weights)), merged=True)
        self._call(groups, local, made)
        return made

    def _groups(self, weights: dict[int, float], *, merged: bool) -> tuple[NDArray[np.int64], list[Any]]:
        """Terms by flip mask, and by observable too unless merged: the observable of each group, and the groups."""
        groups: dict[tuple[int, int], list[tuple[int, complex]]] = {}
        for owner, flip, sign, power, coefficient in self._terms:
            factor = coefficient * power * weights.get(owner, 1.0 if not weights else 0.0)
            groups.setdefault((0 if merged else owner, flip), []).append((sign, factor))
        ordered = sorted(groups.items())
        return np.array([owner for (owner, _), _ in ordered], np.int64), [(k[1], terms) for k, terms in ordered]

    def _call(self, groups: list[Any], local: torch.Tensor, made: torch.Tensor | None) -> NDArray[np.float64]:
        device, real = local.device, real_of(local.dtype)
        each = 1 << TOGETHER[local.dtype]  # amplitudes of a thread
        kinds = [sorted(terms, key=lambda term: _signs_in_thread(term, each)) for _, terms in groups]
        flat = [term for terms in kinds for term in terms]
        counts = [np.bincount([_signs_in_thread(term, each) for term in terms], minlength=each) for terms in kinds]
        factors = np.array([(factor.real, factor.imag) for _, factor in flat]).reshape(-1)
        program = [
            _sent([flip for flip, _ in groups], torch.int64, device),
            _sent([sign for sign, _ in flat], torch.int64, device),
            _sent(np.cumsum([0, *np.concatenate(counts)]), torch.int32, device),
            _sent(factors, real, device),
        ]
        count = _BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
        blocks = max(1, min(count, len(local) // (each * THREADS)))

        def launch(name: str, out: torch.Tensor, number: int) -> None:
            with torch.cuda.device(device):
                kernel = kernel_of("pauli_strings.cu", name, local.dtype, device)
                args = [local, out, *program, number, self.bits]
                kernel(grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=args)

        if made is not None:
            launch("apply_strings", made, len(groups))
            return np.zeros(0)
        values = torch.zeros(len(groups), dtype=torch.float64, device=device)
        sums = torch.zeros(blocks * THREADS, dtype=torch.float64, device=device)
        for group in range(len(groups)):
            launch("string_values", sums, group)
            values[group] = sums.sum()
        return values.cpu().numpy()


def _signs_in_thread(term: tuple[int, complex], each: int) -> int:
    """The signs of a string on the bits in which a thread's amplitudes differ."""
    return term[0] // THREADS % each


def _sent(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([*numbers, 0], dtype=dtype, device=device)  # never empty: kernels take its address


def _masks(pauli_string: PauliString, bit_of: dict[int, int]) -> tuple[int, int, complex]:
    """What the Pauli string flips, whose sign counts (of the amplitude it arrives at), and its power of i."""
    flip = sign = 0
    power = 1 + 0j
    for wire, pauli in pauli_string:
        bit = 1 << bit_of[wire]
        flip |= bit if pauli != "Z" else 0
        sign |= bit if pauli != "X" else 0
        power *= -1j if pauli == "Y" else 1
    return flip, sign, power
