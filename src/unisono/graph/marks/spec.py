"""Placement specs: how the user wants a tensor to be placed, and for which nodes of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements

Strategy = tuple[int, ...]


@dataclass(frozen=True)
class PlacementSpec:
    """How to place a tensor: by placements on a mesh, or (`shard_counts`) by the number of shards along each dim."""

    mesh: Mesh | None = None
    placements: Placements | None = None
    shard_counts: Strategy | None = None
    line: str = ""  # where it was made

    def __str__(self) -> str:
        collectives = (
            f"{self.placements} on {self.mesh}" if self.shard_counts is None else f"strategy {self.shard_counts}"
        )
        return f"{collectives} (marked at {self.line})" if self.line else collectives

    def contradicts(self, other: PlacementSpec | None) -> bool:
        """Whether both cannot hold for one tensor. Of marks for several meshes, one model may have many."""
        return other is not None and self.mesh == other.mesh and self.placements != other.placements


@dataclass(frozen=True)
class Mark:
    """A placement spec for a node of a graph: for its output of that number, or, where `is_input`, for its tensor
    input."""

    node: str
    number: int
    placement_spec: PlacementSpec
    is_input: bool = False
    op: int = -1  # marks of one call of a marked function have the same number


@dataclass(frozen=True)
class PendingMark:
    """A placement spec that is on its way into the graph. for_tensor: for the tensor itself; otherwise for those that
    use it."""

    placement_spec: PlacementSpec
    for_tensor: bool = False
    op: int = -1


def add_spec(placement_specs: dict[str, PlacementSpec], name: str, placement_spec: PlacementSpec) -> None:
    """One more placement spec for a parameter; UsageError where it contradicts one that is there."""
    earlier = placement_specs.get(name)
    if placement_spec.contradicts(earlier):
        raise UsageError(
            f"{name} is marked twice: {earlier} and {placement_spec}; remove one, or build the model again"
        )
    placement_specs[name] = placement_spec


def joined(placement_specs: dict[str, PlacementSpec], more: dict[str, PlacementSpec]) -> dict[str, PlacementSpec]:
    both = dict(placement_specs)
    for name, placement_spec in more.items():
        add_spec(both, name, placement_spec)
    return both
