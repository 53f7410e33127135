"""A mesh as one rank would see it, to look at and not to talk over: no rank has to run."""

from __future__ import annotations

from unisono.mesh.mesh import Mesh


class Seat:
    """A group of ranks as one of them sees it, to look at and not to talk in."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks = tuple(sorted(ranks))
        self.size = len(ranks)
        self.rank = self.ranks.index(rank)


class SeatedMesh:
    """A mesh whose groups are `Seat`s of one rank."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.names = mesh.names
        self.size = mesh.size
        self._mesh = mesh
        self._rank = rank
        self._seats: dict[tuple[str, ...], Seat] = {}

    def comm(self, *names: str) -> Seat:
        if names not in self._seats:
            self._seats[names] = Seat(self._mesh.along(*names, rank=self._rank), self._rank)
        return self._seats[names]
