"""Pauli sums made ready for the kernel in kernels/pauli.py, for a state that one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.quantum.allocation import zeros_like
from unisono.quantum.kernels.threads import count, together
from unisono.quantum.observable import PauliSum, Word

Weighted = tuple[int, float, Word]  # which observable, coefficient, word


class Words:
    """Words of several observables on the wires of a layout (position 0 most significant)."""

    def __init__(self, observables: Sequence[PauliSum], layout: Sequence[int], dtype: torch.dtype) -> None:
        self.observables = len(observables)
        self.bits = len(layout)
        self._part = np.float32 if dtype == torch.complex64 else np.float64
        bit_of = {wire: self.bits - 1 - position for position, wire in enumerate(layout)}
        self._terms = [
            (number, *_masks(word, bit_of), coefficient)
            for number, observable in enumerate(observables)
            for coefficient, word in observable.paulis().terms
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
        """The expectation of each group, and the sum of what they make of the state, where it is asked for."""
        from unisono.quantum.kernels.pauli import BLOCK, apply_words

        size, part = 1 << min(BLOCK, self.bits), self._part
        costate = np.zeros(0, part) if made is None else torch.view_as_real(made).view(-1).numpy()
        low = size - 1
        state = torch.view_as_real(local).view(-1).numpy()
        flips = np.array([flip for flip, _ in groups], np.int64)
        starts = np.cumsum([0, *(len(terms) for _, terms in groups)]).astype(np.int64)
        flat = [term for _, terms in groups for term in terms]
        signs = np.array([sign & ~low for sign, _ in flat], np.int64)
        factors = np.array([(factor.real, factor.imag) for _, factor in flat], part).reshape(-1, 2)
        fixed = np.zeros((len(groups), 2, size), part)
        rows: dict[int, int] = {0: 0}
        places = np.full(len(flat), -1, np.int64)
        for group, (_, terms) in enumerate(groups):
            for number, (sign, factor) in enumerate(terms, start=int(starts[group])):
                if sign & ~low:
                    places[number] = rows.setdefault(sign & low, len(rows))
                else:
                    table = _signs(sign, size)
                    fixed[group, 0] += factor.real * table
                    fixed[group, 1] += factor.imag * table
        tables = np.stack([_signs(mask, size) for mask in rows]).astype(part)
        threads = min(count(), max(1, len(local) // size))
        values = np.zeros((threads, len(groups)))
        counters = np.zeros(1, np.int64)

        def call(number: int) -> None:
            re, im = np.empty(size, part), np.empty(size, part)
            apply_words(
                state, costate, flips, starts, signs, factors, fixed, tables, places, re, im, values[number], counters
            )

        if groups:
            together(call, threads)
        elif len(costate):
            costate[:] = 0
        return values.sum(axis=0)


def _masks(word: Word, bit_of: dict[int, int]) -> tuple[int, int, complex]:
    """What the word flips, whose sign counts (of the amplitude it arrives at), and its power of i."""
    flip = sign = 0
    power = 1 + 0j
    for wire, letter in word:
        bit = 1 << bit_of[wire]
        flip |= bit if letter != "Z" else 0
        sign |= bit if letter != "X" else 0
        power *= -1j if letter == "Y" else 1
    return flip, sign, power


def _signs(mask: int, size: int) -> NDArray[np.float64]:
    return 1.0 - 2.0 * (np.bitwise_count(np.arange(size) & mask) & 1)
