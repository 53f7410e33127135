"""The communication of a rank at one point of a program."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CollectiveStep:
    """A step of a move, as one rank sees it: a collective, or a slice or the like that needs no other rank."""

    kind: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    received: int  # bytes
    before: Shape  # the local shard
    after: Shape
    detail: str  # what is reduced, gathered or sharded
    is_collective: bool
