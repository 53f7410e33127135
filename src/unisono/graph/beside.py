"""What ranks do beside the ops of a model: a plan's, which shares out what no op cuts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from unisono.graph.talk import Shape, Talk


class Named(Protocol):
    @property
    def name(self) -> str: ...


Each = TypeVar("Each", bound=Named)


@dataclass(frozen=True)
class Aside:
    """A line between ops. The forward reads it on the way down, the backward on the way up."""

    name: str
    words: str
    forward: tuple[Talk, ...] = ()
    backward: tuple[Talk, ...] = ()


@dataclass(frozen=True)
class Inside:
    """What is said in the midst of an op that ranks do together, and what they call it."""

    words: str
    forward: tuple[Talk, ...] = ()
    backward: tuple[Talk, ...] = ()


@dataclass
class Beside:
    before: dict[str, list[Aside]] = field(default_factory=dict)  # by the instruction that comes after them
    after: dict[str, list[Aside]] = field(default_factory=dict)  # by the instruction that comes before them
    inside: dict[str, Inside] = field(default_factory=dict)  # by op
    sums: list[Talk] | None = None  # of gradients, after the backward, where they are not those of the graph
    closing: list[Talk] = field(default_factory=list)  # after these sums, before the optimizer
    updates: list[Talk] = field(default_factory=list)  # after the optimizer
    kept: dict[str, Shape] = field(default_factory=dict)  # parameters' nodes: the rows that a rank has, of all of them
    keeping: str = ""  # what it has them for
    notes: dict[str, str] = field(default_factory=dict)  # on placeholders
    about: list[str] = field(default_factory=list)  # what is true of all of the program

    def woven(self, instructions: Iterable[Each]) -> list[Each | Aside]:
        """Instructions, and what is done before and after each."""
        lines: list[Each | Aside] = []
        for each in instructions:
            lines += [*self.before.get(each.name, ()), each, *self.after.get(each.name, ())]
        return lines
