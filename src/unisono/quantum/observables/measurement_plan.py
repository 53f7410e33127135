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

LETTERS = "IXYZ"
Letters = NDArray[np.int8]  # (words, wires), indices into LETTERS
BasisRotations = tuple[tuple[int, str], ...]  # (wire, the Pauli that becomes Z)


@dataclass(frozen=True)
class Shift:
    """Words to read with the rank whose held index differs by `flip`; 0: with oneself."""

    flip: int
    words: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """Turn local wires, exchange, turn back the wires that came, and read.

    `layout` is the one to read in; frames[wire] is the letter that a held wire's Z then stands for."""

    turn: BasisRotations
    exchange: Exchange | None
    turn_back: BasisRotations
    layout: tuple[int, ...]
    frames: dict[int, str]
    shifts: tuple[Shift, ...] = ()


@dataclass(frozen=True)
class Reading:
    stages: tuple[Stage, ...]

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


def reading(words: Sequence[PauliString], layout: Sequence[int], held: int) -> Reading:
    """The plan for words on a state with this layout."""
    letters = _letters(words, len(layout))
    stages = [Stage((), None, (), tuple(layout), {})]
    flips = [_flips(letters, stages[0], held)]
    left = [np.flatnonzero(flips[0])]
    while len(left[-1]) and len(stages) < 2**held:
        stage = _best_stage(letters[left[-1]], stages[-1], held)
        flip = _flips(letters, stage, held)
        still = left[-1][flip[left[-1]] != 0]
        if len(still) == len(left[-1]):
            break
        stages.append(stage)
        flips.append(flip)
        left.append(still)
    costs = [number + len(set(flips[number][left[number]])) for number in range(len(stages))]
    last = int(np.argmin(costs))
    before = np.arange(len(words))
    kept = []
    for number in range(last + 1):
        now = before if number == last else np.setdiff1d(before, left[number])
        kept.append(replace(stages[number], shifts=_shifts(flips[number], now)))
        before = left[number]
    return Reading(tuple(kept))


def _best_stage(letters: Letters, now: Stage, held: int) -> Stage:
    """Hold, instead of some wires, those that the words left over agree most about."""
    open_words = np.ones(len(letters), dtype=bool)
    chosen: dict[int, str] = {}
    local = list(now.layout[held:])
    for _ in range(held):
        counts = {(wire, b): _agree(letters, wire, b)[open_words].sum() for wire in local for b in "ZXY"}
        counts |= {(wire, b): _agree(letters, wire, b)[open_words].sum() for wire, b in _kept(now, held, chosen)}
        wire, letter = max(counts, key=lambda key: (counts[key], key[1] == "Z"))
        chosen[wire] = letter
        open_words &= _agree(letters, wire, letter)
        if wire in local:
            local.remove(wire)
    stay = [wire for wire in now.layout[:held] if wire in chosen]
    leave = [position for position in range(held) if now.layout[position] not in chosen]
    come = [position for position in range(held, len(now.layout)) if now.layout[position] in chosen]
    layout = list(now.layout)
    for give, take in zip(come, leave, strict=True):
        layout[give], layout[take] = layout[take], layout[give]
    turn = tuple((now.layout[p], chosen[now.layout[p]]) for p in come if chosen[now.layout[p]] != "Z")
    back = tuple((now.layout[p], now.frames[now.layout[p]]) for p in leave if now.layout[p] in now.frames)
    frames = {wire: now.frames[wire] for wire in stay if wire in now.frames} | dict(turn)
    return Stage(turn, Exchange(tuple(come), tuple(leave)) if come else None, back, tuple(layout), frames)


def _kept(now: Stage, held: int, chosen: dict[int, str]) -> list[tuple[int, str]]:
    """Held wires that may stay held, in the frame they have."""
    return [(wire, now.frames.get(wire, "Z")) for wire in now.layout[:held] if wire not in chosen]


def _agree(letters: Letters, wire: int, letter: str) -> NDArray[np.bool_]:
    return (letters[:, wire] == 0) | (letters[:, wire] == LETTERS.index(letter))


def _flips(letters: Letters, stage: Stage, held: int) -> NDArray[np.int64]:
    """The mask of held positions that each word flips, in a stage's layout and frames."""
    flips = np.zeros(len(letters), dtype=np.int64)
    for position, wire in enumerate(stage.layout[:held]):
        mixes = ~_agree(letters, wire, stage.frames.get(wire, "Z"))
        flips |= mixes.astype(np.int64) << (held - 1 - position)
    return flips


def _shifts(flips: NDArray[np.int64], words: NDArray[np.int64]) -> tuple[Shift, ...]:
    return tuple(
        Shift(int(flip), tuple(words[flips[words] == flip].tolist())) for flip in sorted(set(flips[words].tolist()))
    )


def _letters(words: Iterable[PauliString], wires: int) -> Letters:
    words = list(words)
    letters = np.zeros((len(words), wires), dtype=np.int8)
    for number, word in enumerate(words):
        for wire, letter in word:
            letters[number, wire] = LETTERS.index(letter)
    return letters
