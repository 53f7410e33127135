"""An observable applied to a state: the co-state that gradients and variances start from.

A Pauli string maps |i> to f(i) |i ^ x>, f a sign and a power of i; strings that flip the same bits share one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from unisono.quantum.kernels.pauli_strings import add_pauli_strings
from unisono.quantum.kernels.reference import block
from unisono.quantum.observables.observable import PauliString, PauliSum, Values
from unisono.quantum.state import State

_CHUNK = 1 << 18  # amplitudes whose copies in double precision are in memory together

Masked = tuple[
    int, int, complex
]  # bits that a Pauli string flips, bits whose sign counts, its coefficient and power of i


def applied(state: State, observable: PauliSum) -> State:
    """O|state>, a state of the same layout that is not normalised. Ranks exchange once for each mask of global qubits
    that Pauli strings flip; the state itself is not changed."""
    observable.check(state.wires)
    return applied_pauli_strings(
        state, PauliSum(observable.terms, observable.blocks).paulis().terms, observable.projectors
    )


def applied_pauli_strings(
    state: State, terms: Sequence[tuple[float, PauliString]], projectors: Sequence[tuple[float, Values]]
) -> State:
    """The same for weighted Pauli strings and projectors."""
    made = state.blank()
    axes = state.wires - state.global_qubits
    by_flip: dict[int, list[Masked]] = {}
    for coefficient, pauli_string in terms:
        masked = _masked(coefficient, pauli_string, state)
        by_flip.setdefault(masked[0] >> axes, []).append(masked)
    for flip, group in sorted(by_flip.items()):
        for offset, theirs in state.partner_chunks(flip):
            _add(made.local, state, offset, theirs, group, flip)
    for coefficient, values in projectors:
        _project(made.local, state, coefficient, dict(values))
    return made


def inner(left: State, right: State) -> complex:
    """<left|right> of two states of one layout, of any precision; summed in double precision."""
    chunks = zip(left.local.split(_CHUNK), right.local.split(_CHUNK), strict=True)
    products = [torch.vdot(a.to(torch.complex128), b.to(torch.complex128)) for a, b in chunks]
    parts = left.total(torch.view_as_real(torch.stack(products).sum()).clone())
    return complex(*parts.tolist())


def _add(into: torch.Tensor, state: State, offset: int, theirs: torch.Tensor, group: list[Masked], flip: int) -> None:
    """Add what the Pauli strings make of the partner's amplitudes at `offset`."""
    axes, width = state.wires - state.global_qubits, len(theirs)
    global_index = int(state.index_map.table[state.rank]) ^ flip
    above = (global_index << axes) | offset
    shifts: dict[int, dict[int, list[tuple[int, complex]]]] = {}  # by position, then by what is flipped within it
    for flips, signs, factor in group:
        sign = -1 if (above & signs & ~(width - 1)).bit_count() % 2 else 1
        at = offset ^ (flips & ((1 << axes) - 1) & ~(width - 1))
        shifts.setdefault(at, {}).setdefault(flips & (width - 1), []).append((signs & (width - 1), sign * factor))
    for at, by_flip in shifts.items():
        groups = [
            (flip, np.array([mask for mask, _ in members]), np.array([scale for _, scale in members]))
            for flip, members in sorted(by_flip.items())
        ]
        add_pauli_strings(into[at : at + width], theirs, groups)


def _masked(coefficient: float, pauli_string: PauliString, state: State) -> Masked:
    flips = signs = 0
    factor = complex(coefficient)
    for wire, pauli in pauli_string:
        bit = 1 << (state.wires - 1 - state.layout.index(wire))
        flips |= bit if pauli in "XY" else 0
        signs |= bit if pauli in "YZ" else 0
        factor *= 1j if pauli == "Y" else 1
    return flips, signs, factor


def _project(into: torch.Tensor, state: State, coefficient: float, values: dict[int, int]) -> None:
    axes = {wire: state.axis(wire) for wire in values}
    if any(axis is None and state.value(wire) != values[wire] for wire, axis in axes.items()):
        return
    local = {axis: values[wire] for wire, axis in axes.items() if axis is not None}
    index = int("0" + "".join(map(str, local.values())), 2)
    block(into, [*local], index).add_(block(state.local, [*local], index), alpha=coefficient)
