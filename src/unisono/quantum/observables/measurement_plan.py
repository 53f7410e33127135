"""How many Pauli strings are evaluated on a sharded state with few exchanges.

A string needs no exchange where it is diagonal on every global qubit. For the others:

    a stage   rotates local qubits so that the Pauli that most strings have there becomes Z, then makes them global:
              every string that has that Pauli or the identity on the global qubits needs no further exchange
    a shift   pairs each rank with the one whose global index differs by a mask: evaluates every string that flips it

Stages are chosen greedily, for the most strings each; then as many are kept as make the fewest exchanges together with
the shifts that the remaining strings need. There are at most 2^g - 1 shifts, however many the strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.observables.observable import PauliString
from unisono.quantum.schedule.step import Exchange

PAULI_ORDER = "IXYZ"
PauliTable = NDArray[np.int8]  # (Pauli strings, wires), indices into PAULI_ORDER
BasisRotations = tuple[tuple[int, str], ...]  # (wire, the Pauli that becomes Z)


@dataclass(frozen=True)
class Shift:
    """Words to read with the rank whose global index differs by `flip`; 0: with oneself."""

    flip: int
    pauli_strings: tuple[int, ...]


@dataclass(frozen=True)
class MeasurementStage:
    """Rotate local wires, exchange, rotate back the wires that came, and read.

    `layout` is the one to read in; frames[wire] is the Pauli that a global qubit's Z then stands for."""

    rotate: BasisRotations
    exchange: Exchange | None
    rotate_back: BasisRotations
    layout: tuple[int, ...]
    frames: dict[int, str]
    shifts: tuple[Shift, ...] = ()


@dataclass(frozen=True)
class Reading:
    stages: tuple[MeasurementStage, ...]

    @property
    def exchanges(self) -> int:
        """How many times ranks exchange while reading (to put the layout back takes one for each stage's own again)."""
        shifts = sum(shift.flip != 0 for stage in self.stages for shift in stage.shifts)
        return shifts + sum(stage.exchange is not None for stage in self.stages)

    def sent(self, shard: int) -> int:
        """Bytes that a rank with a part of `shard` bytes sends."""
        total = 0
        for stage in self.stages:
            total += shard * sum(shift.flip != 0 for shift in stage.shifts)
            if stage.exchange is not None:
                total += shard - (shard >> len(stage.exchange.give))
        return total


def reading(pauli_strings: Sequence[PauliString], layout: Sequence[int], global_qubits: int) -> Reading:
    """The plan for Pauli strings on a state with this layout."""
    paulis = _pauli_table(pauli_strings, len(layout))
    stages = [MeasurementStage((), None, (), tuple(layout), {})]
    flips = [_flips(paulis, stages[0], global_qubits)]
    left = [np.flatnonzero(flips[0])]
    while len(left[-1]) and len(stages) < 2**global_qubits:
        stage = _best_stage(paulis[left[-1]], stages[-1], global_qubits)
        flip = _flips(paulis, stage, global_qubits)
        still = left[-1][flip[left[-1]] != 0]
        if len(still) == len(left[-1]):
            break
        stages.append(stage)
        flips.append(flip)
        left.append(still)
    costs = [number + len(set(flips[number][left[number]])) for number in range(len(stages))]
    last = int(np.argmin(costs))
    before = np.arange(len(pauli_strings))
    kept = []
    for number in range(last + 1):
        now = before if number == last else np.setdiff1d(before, left[number])
        kept.append(replace(stages[number], shifts=_shifts(flips[number], now)))
        before = left[number]
    return Reading(tuple(kept))


def _best_stage(paulis: PauliTable, now: MeasurementStage, global_qubits: int) -> MeasurementStage:
    """Hold, instead of some wires, those that the Pauli strings left over agree most about."""
    open_strings = np.ones(len(paulis), dtype=bool)
    chosen: dict[int, str] = {}
    local = list(now.layout[global_qubits:])
    for _ in range(global_qubits):
        counts = {(wire, b): _agree(paulis, wire, b)[open_strings].sum() for wire in local for b in "ZXY"}
        counts |= {
            (wire, b): _agree(paulis, wire, b)[open_strings].sum() for wire, b in _kept(now, global_qubits, chosen)
        }
        wire, pauli = max(counts, key=lambda key: (counts[key], key[1] == "Z"))
        chosen[wire] = pauli
        open_strings &= _agree(paulis, wire, pauli)
        if wire in local:
            local.remove(wire)
    stay = [wire for wire in now.layout[:global_qubits] if wire in chosen]
    leave = [position for position in range(global_qubits) if now.layout[position] not in chosen]
    come = [position for position in range(global_qubits, len(now.layout)) if now.layout[position] in chosen]
    layout = list(now.layout)
    for give, take in zip(come, leave, strict=True):
        layout[give], layout[take] = layout[take], layout[give]
    rotate = tuple((now.layout[p], chosen[now.layout[p]]) for p in come if chosen[now.layout[p]] != "Z")
    back = tuple((now.layout[p], now.frames[now.layout[p]]) for p in leave if now.layout[p] in now.frames)
    frames = {wire: now.frames[wire] for wire in stay if wire in now.frames} | dict(rotate)
    return MeasurementStage(rotate, Exchange(tuple(come), tuple(leave)) if come else None, back, tuple(layout), frames)


def _kept(now: MeasurementStage, global_qubits: int, chosen: dict[int, str]) -> list[tuple[int, str]]:
    """Global qubits that may stay global, in the frame they have."""
    return [(wire, now.frames.get(wire, "Z")) for wire in now.layout[:global_qubits] if wire not in chosen]


def _agree(paulis: PauliTable, wire: int, pauli: str) -> NDArray[np.bool_]:
    return (paulis[:, wire] == 0) | (paulis[:, wire] == PAULI_ORDER.index(pauli))


def _flips(paulis: PauliTable, stage: MeasurementStage, global_qubits: int) -> NDArray[np.int64]:
    """The mask of global positions that each Pauli string flips, in a stage's layout and frames."""
    flips = np.zeros(len(paulis), dtype=np.int64)
    for position, wire in enumerate(stage.layout[:global_qubits]):
        mixes = ~_agree(paulis, wire, stage.frames.get(wire, "Z"))
        flips |= mixes.astype(np.int64) << (global_qubits - 1 - position)
    return flips


def _shifts(flips: NDArray[np.int64], pauli_strings: NDArray[np.int64]) -> tuple[Shift, ...]:
    return tuple(
        Shift(int(flip), tuple(pauli_strings[flips[pauli_strings] == flip].tolist()))
        for flip in sorted(set(flips[pauli_strings].tolist()))
    )


def _pauli_table(pauli_strings: Iterable[PauliString], wires: int) -> PauliTable:
    pauli_strings = list(pauli_strings)
    paulis = np.zeros((len(pauli_strings), wires), dtype=np.int8)
    for number, pauli_string in enumerate(pauli_strings):
        for wire, pauli in pauli_string:
            paulis[number, wire] = PAULI_ORDER.index(pauli)
    return paulis
