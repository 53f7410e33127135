"""Expectation values of observables on a sharded state.

A Pauli string P maps amplitude i to i ^ x with the sign (-1)^(i & z) and a power of i; x and z are masks of its Paulis.
Strings with the same x share the products conj(psi[i ^ x]) psi[i]; their signed sums are computed together
(kernels/pauli_strings.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unisono.quantum.circuit.gates import gate
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.distributed.local_steps import LocalOperations, local_exchange
from unisono.quantum.kernels.pauli_strings import pauli_sums
from unisono.quantum.kernels.reference import block
from unisono.quantum.observables.measurement_plan import BasisRotations, MeasurementStage, Reading, Shift, reading
from unisono.quantum.observables.observable import PauliString, PauliSum
from unisono.quantum.observables.observable import observables as parsed
from unisono.quantum.state import State, require_state

TO_Z = {"X": ("h", "h"), "Y": ("sx", "sxdg")}  # the gate that makes the Pauli Z, and the one back
_IN_FRAME = {  # what a Pauli is once the wire is turned, and its sign
    "X": {"X": ("Z", 1), "Z": ("X", 1), "Y": ("Y", -1)},
    "Y": {"Y": ("Z", 1), "Z": ("Y", -1), "X": ("X", 1)},
}


def expectations(state: State, observables: Any, *, restore: bool = True) -> torch.Tensor:
    """The expectation value of each observable, float64, on every rank.

    Args:
        state: The state.
        observables: One or several.
        restore: Whether the state gets its layout back, for gates that follow.
    """
    return Observed(parsed(observables), require_state(state, "expectations").wires).values(state, restore=restore)


class Observed:
    """Observables made ready to be read many times: `sums` are their Pauli strings, matrices written out, and
    `projectors` what is left; `pauli_strings` has each string once."""

    def __init__(self, observables: Sequence[PauliSum], wires: int) -> None:
        plain = [each.check(wires) for each in observables]
        self.sums = [PauliSum(each.terms, each.blocks).paulis().terms for each in plain]
        self.projectors = [each.projectors for each in plain]
        self.pauli_strings = sorted({pauli_string for terms in self.sums for _, pauli_string in terms})

    def values(self, state: State, *, restore: bool = True) -> torch.Tensor:
        values = dict(
            zip(self.pauli_strings, pauli_values(state, self.pauli_strings, restore=restore).tolist(), strict=True)
        )
        found = [
            sum(coefficient * values[pauli_string] for coefficient, pauli_string in terms)
            + sum(coefficient * _projected(state, bits) for coefficient, bits in projectors)
            for terms, projectors in zip(self.sums, self.projectors, strict=True)
        ]
        return torch.tensor(found, dtype=torch.float64)


def pauli_values(state: State, pauli_strings: Sequence[PauliString], *, restore: bool = True) -> torch.Tensor:
    """The expectation of each Pauli string, read with the exchanges of `reading`; one sum over ranks at the end."""
    plan = reading(pauli_strings, state.layout, state.global_qubits)
    values = np.zeros(len(pauli_strings))
    for stage in plan.stages:
        _enter(state, stage)
        for shift in stage.shifts:
            _read(state, stage, shift, pauli_strings, values)
    if restore:
        _return(state, plan)
    return state.total(torch.from_numpy(values).to(state.device)).cpu()


def _enter(state: State, stage: MeasurementStage) -> None:
    _rotate(state, stage.rotate, back=False)
    if stage.exchange is not None:
        state.exchange(local_exchange(stage.exchange, state.index_map, state.rank))
    state.layout = stage.layout
    _rotate(state, stage.rotate_back, back=True)


def _return(state: State, plan: Reading) -> None:
    for stage, before in zip(reversed(plan.stages[1:]), reversed(plan.stages[:-1]), strict=True):
        _rotate(state, stage.rotate_back, back=False)
        if stage.exchange is not None:
            state.exchange(local_exchange(stage.exchange, state.index_map, state.rank))
        state.layout = before.layout
        _rotate(state, stage.rotate, back=True)


def _rotate(state: State, rotations: BasisRotations, *, back: bool) -> None:
    operations = []
    for wire, pauli in rotations:
        axis = state.axis(wire)
        assert axis is not None, f"wire {wire} is rotated while it is global"
        operations.append(Operation(gate(TO_Z[pauli][back]), (axis,)))
    if operations:
        state.apply(LocalOperations(tuple(operations)))


@dataclass(frozen=True)
class _Masks:
    """A Pauli string on physical bits: what it flips, whose sign counts, and its power of i, with signs of frames."""

    flip: int
    sign: int
    factor: complex


def _masks(pauli_string: PauliString, stage: MeasurementStage) -> _Masks:
    flip = sign = 0
    factor = complex(1)
    top = len(stage.layout) - 1
    for wire, original in pauli_string:
        pauli, rotated = _IN_FRAME[stage.frames[wire]][original] if wire in stage.frames else (original, 1)
        bit = 1 << (top - stage.layout.index(wire))
        factor *= rotated
        if pauli in "XY":
            flip |= bit
        if pauli in "YZ":
            sign |= bit
        if pauli == "Y":
            factor *= 1j
    return _Masks(flip, sign, factor)


def _read(
    state: State, stage: MeasurementStage, shift: Shift, pauli_strings: Sequence[PauliString], values: np.ndarray
) -> None:
    """Add this rank's part of each Pauli string's value."""
    axes = state.wires - state.global_qubits
    local = (1 << axes) - 1
    held_index = int(state.index_map.table[state.rank])
    groups: dict[int, list[tuple[int, _Masks]]] = {}
    for number in shift.pauli_strings:
        masks = _masks(pauli_strings[number], stage)
        groups.setdefault(masks.flip & local, []).append((number, masks))
    for offset, theirs in state.partner_chunks(shift.flip):
        width = len(theirs)
        by_offset: dict[int, list[int]] = {}
        for flip in groups:
            by_offset.setdefault(offset ^ (flip & ~(width - 1)), []).append(flip)
        for at, flips in by_offset.items():
            members = [(number, masks) for flip in flips for number, masks in groups[flip]]
            within = [
                (flip & (width - 1), np.array([masks.sign & (width - 1) for _, masks in groups[flip]]))
                for flip in flips
            ]
            sums = np.concatenate(pauli_sums(state.local[at : at + width], theirs, within))
            for (number, masks), total in zip(members, sums.tolist(), strict=True):
                outside = (held_index << axes | at) & masks.sign & ~(width - 1)
                values[number] += (masks.factor * total).real * (-1) ** outside.bit_count()


def _projected(state: State, values: Sequence[tuple[int, int]]) -> float:
    """The probability of reading these bits on these wires."""
    axes, index, mine = [], 0, True
    for wire, bit in values:
        axis = state.axis(wire)
        if axis is None:
            mine &= state.value(wire) == bit
        else:
            axes.append(axis)
            index = index << 1 | bit
    part = block(state.local, axes, index) if axes else state.local
    chance = torch.linalg.vector_norm(torch.view_as_real(part), dtype=torch.float64) ** 2
    return float(state.total(chance * mine))
