"""The primitives of a tile in few passes: stages of rotations that run together, each followed by one merged phase.

In terms of rows (frame.py) a rotation changes rows by its mask, and a rotation or phase reads parities. Two items
conflict when one changes what the other reads. Everything goes to the earliest stage that its conflicts allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from unisono.quantum.circuit.parameter import Affine
from unisono.quantum.compile.frame import Frame, Parity, TileLayout, odd
from unisono.quantum.compile.lowering import Dense, Flip, Phase, Primitive, Rotation

Guards = tuple[tuple[Parity, int], ...]  # parities and the values they must have


@dataclass
class Mix:
    """Something that mixes rows: a rotation of one bit, X under lanes, or a dense matrix on several bits."""

    masks: tuple[int, ...]
    bits: tuple[Parity, ...]
    guards: Guards = ()
    angle: Affine | None = None  # of a rotation
    matrix: np.ndarray | None = None
    guard_masks: dict[int, int] = field(default_factory=dict)  # row mask that flips the parity of guard i alone
    level: int = 0

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(parity.rows for parity in self.bits) + tuple(parity.rows for parity, _ in self.guards)

    @property
    def plain(self) -> bool:
        return self.angle is not None and not self.guards

    def conflicts(self, other: Mix) -> bool:
        return changes(self.masks, other.reads) or changes(other.masks, self.reads)

    def absorbs(self, other: Mix) -> bool:
        """Whether both are rotations of the same bit under the same guards, so that angles add up."""
        same = self.masks == other.masks and self.bits == other.bits and self.guards == other.guards
        return same and self.angle is not None and other.angle is not None


@dataclass(frozen=True)
class Term:
    """A phase in terms of parities."""

    guards: Guards
    bits: tuple[Parity, ...]
    phase: Phase

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(parity.rows for parity in self.bits) + tuple(parity.rows for parity, _ in self.guards)


@dataclass
class CompiledStage:
    mixes: list[Mix] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)

    def levels(self) -> list[list[Mix]]:
        """The mixes in order, those that do not conflict side by side."""
        levels: list[list[Mix]] = [[] for _ in range(1 + max((mix.level for mix in self.mixes), default=-1))]
        for mix in self.mixes:
            levels[mix.level].append(mix)
        return levels


def stages(primitives: Iterable[Primitive], layout: TileLayout, top: int) -> tuple[list[CompiledStage], Frame]:
    """The stages of a tile, and the frame that its rows end in. Axis a is bit top - a."""
    frame = Frame(layout)
    made: list[CompiledStage] = []
    for primitive in primitives:
        if isinstance(primitive, Flip):
            target = top - primitive.target
            control = None if primitive.control is None else top - primitive.control
            if control is None or not frame.parity[control].lanes:
                frame.flip(target, control)
                continue
            guards = ((frame.parity[control], 1),)
            add_mix(made, Mix((frame.mask[target],), (frame.parity[target],), guards))
        elif isinstance(primitive, Phase):
            bits = tuple(frame.group(top - axis for axis in group) for group in primitive.parities)
            add_term(made, Term(_guards(frame, primitive.controls, top), bits, primitive))
        else:
            add_mix(made, _mix(frame, primitive, top))
    return made, frame


def _mix(frame: Frame, primitive: Rotation | Dense, top: int) -> Mix:
    targets = primitive.targets if isinstance(primitive, Dense) else (primitive.target,)
    guard_masks = {
        number: frame.mask[top - axis]
        for number, (axis, _) in enumerate(primitive.controls)
        if top - axis in frame.mask
    }
    return Mix(
        tuple(frame.mask[top - axis] for axis in targets),
        tuple(frame.parity[top - axis] for axis in targets),
        _guards(frame, primitive.controls, top),
        primitive.angle if isinstance(primitive, Rotation) else None,
        primitive.matrix if isinstance(primitive, Dense) else None,
        guard_masks,
    )


def _guards(frame: Frame, controls: Sequence[tuple[int, int]], top: int) -> Guards:
    return tuple((frame.parity[top - axis], value) for axis, value in controls)


def add_mix(made: list[CompiledStage], mix: Mix) -> None:
    """After every phase it conflicts with; within that stage, after every mix it conflicts with."""
    first = 0
    for number in reversed(range(len(made))):
        if any(changes(mix.masks, term.reads) for term in made[number].terms):
            first = number + 1
            break
        if any(mix.conflicts(other) for other in made[number].mixes):
            first = number
            break
    while len(made) <= first:
        made.append(CompiledStage())
    stage = made[first]
    before = [other for other in stage.mixes if mix.conflicts(other)]
    mix.level = 1 + max((other.level for other in before), default=-1)
    last = [other for other in before if other.level == mix.level - 1]
    if len(last) == 1 and last[0].absorbs(mix):
        assert last[0].angle is not None
        assert mix.angle is not None
        last[0].angle = last[0].angle + mix.angle
        return
    stage.mixes.append(mix)


def add_term(made: list[CompiledStage], term: Term) -> None:
    first = 0
    for number in reversed(range(len(made))):
        if any(changes(mix.masks, term.reads) for mix in made[number].mixes):
            first = number
            break
    while len(made) <= first:
        made.append(CompiledStage())
    made[first].terms.append(term)


def changes(masks: Iterable[int], reads: Iterable[int]) -> bool:
    reads = tuple(reads)
    return any(odd(mask & read) for mask in masks for read in reads)
