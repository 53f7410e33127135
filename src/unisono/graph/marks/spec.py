"""Wishes: how the user wants a tensor to lie, and for which nodes of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements

Strategy = tuple[int, ...]


@dataclass(frozen=True)
class Wish:
    """How a tensor is to lie: by placements on a mesh, or (`pieces`) by how many pieces each dim is cut into."""

    mesh: Mesh | None = None
    placements: Placements | None = None
    pieces: Strategy | None = None
    line: str = ""  # where it was made

    def __str__(self) -> str:
        said = f"{self.placements} on {self.mesh}" if self.pieces is None else f"strategy {self.pieces}"
        return f"{said} (marked at {self.line})" if self.line else said

    def contradicts(self, other: Wish | None) -> bool:
        """Whether both cannot hold for one tensor. Of marks for several meshes, one model may have many."""
        return other is not None and self.mesh == other.mesh and self.placements != other.placements


@dataclass(frozen=True)
class Mark:
    """A wish for a node of a graph: for its output of that number, or, where `is_input`, for its tensor input."""

    node: str
    number: int
    wish: Wish
    is_input: bool = False
    op: int = -1  # marks of one call of a marked function have the same number


@dataclass(frozen=True)
class Note:
    """A wish that is on its way into the graph. lies: for the tensor itself; otherwise for those that use it."""

    wish: Wish
    lies: bool = False
    op: int = -1


def add_wish(wishes: dict[str, Wish], name: str, wish: Wish) -> None:
    """One more wish for a parameter; UsageError where it contradicts one that is there."""
    earlier = wishes.get(name)
    if wish.contradicts(earlier):
        raise UsageError(f"{name} is marked twice: {earlier} and {wish}; remove one, or build the model anew")
    wishes[name] = wish


def joined(wishes: dict[str, Wish], more: dict[str, Wish]) -> dict[str, Wish]:
    both = dict(wishes)
    for name, wish in more.items():
        add_wish(both, name, wish)
    return both
