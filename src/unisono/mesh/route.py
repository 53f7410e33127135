"""The route from one list of placements to another: which steps, in which order, at the least cost.

A state is a list of placements. A step changes the placement of one axis, or of several axes at once where one group
can serve them together, and costs what a rank receives:

    step            changes                  receives, of N bytes held locally before it, in a group of n
    all_gather      Shard(d)  -> Replicate   N (n - 1)
    all_reduce      Partial   -> Replicate   2 N (n - 1) / n
    reduce_scatter  Partial   -> Shard(d)    N (n - 1) / n
    all_to_all      Shard(d)  -> Shard(e)    N (n - 1) / n
    cut             Replicate -> Shard(d)    nothing
    spread          Shard(d)  -> Partial     nothing: each rank's piece, in zeros
    assign          Replicate -> Partial     nothing: one rank keeps the value

The cheapest route is a shortest path over states (Dijkstra's). Where several axes shard one dim, the pieces of a later
axis lie within those of an earlier one, so only the last of them may let go of the dim, and a new one comes last.
Nothing here talks, and nothing depends on which rank asks: all ranks find the same route.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Partial, Replicate, Shard

from unisono.mesh.placement import Placement, Placements, is_partial, shard_dim

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
STEP_COST = 16384.0  # what a collective costs besides its bytes, in bytes
LOCAL_COST = 1.0  # tells routes apart that talk equally little


@dataclass(frozen=True)
class Step:
    """One change of placement on `axes` (numbers of the mesh's axes, rising)."""

    kind: str
    axes: tuple[int, ...]
    before: Placement
    after: Placement
    received: float  # bytes that a rank receives

    @property
    def talks(self) -> bool:
        return self.kind in COLLECTIVES

    @property
    def cost(self) -> float:
        return self.received + (STEP_COST if self.talks else LOCAL_COST)


@lru_cache(maxsize=4096)
def find_route(
    shape: tuple[int, ...], itemsize: int, mesh_shape: tuple[int, ...], source: Placements, target: Placements
) -> tuple[Step, ...]:
    """The cheapest steps that bring a tensor of that (whole) shape from `source` to `target` on a mesh."""
    search = _Search(shape, itemsize, mesh_shape, source, target)
    ticket = itertools.count()  # states do not compare
    frontier: list[tuple[float, int, Placements, tuple[Step, ...]]] = [(0.0, next(ticket), source, ())]
    settled: set[Placements] = set()
    while frontier:
        cost, _, state, route = heapq.heappop(frontier)
        if state == target:
            return route
        if state in settled:
            continue
        settled.add(state)
        for step in search.steps(state):
            reached = tuple(step.after if axis in step.axes else old for axis, old in enumerate(state))
            if reached not in settled:
                heapq.heappush(frontier, (cost + step.cost, next(ticket), reached, (*route, step)))
    raise AssertionError(f"no route from {source} to {target}")  # everything can be gathered, then cut


class _Search:
    """The steps that lead on from a state."""

    def __init__(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        mesh_shape: tuple[int, ...],
        source: Placements,
        target: Placements,
    ) -> None:
        self.shape = shape
        self.itemsize = itemsize
        self.mesh_shape = mesh_shape
        self.target = target
        used = {dim for p in (*source, *target) if (dim := shard_dim(p)) is not None}
        # One dim more to step aside to, where axes are in each other's way on a dim that both cut.
        aside = sorted(set(range(len(shape))) - used, key=lambda dim: shape[dim])[-1:]
        self.dims = sorted(used) + aside

    def steps(self, state: Placements) -> Iterator[Step]:
        for axes in self._axes_that_move_together(state):
            before = state[axes[0]]
            dim = shard_dim(before)
            if isinstance(before, Partial):
                yield self._step("all_reduce", state, axes, Replicate())
                for after in self._new_shards(state, axes):
                    yield self._step("reduce_scatter", state, axes, after)
            elif dim is not None:
                yield self._step("all_gather", state, axes, Replicate())
                for after in self._new_shards(state, axes):
                    if after != before:
                        yield self._step("all_to_all", state, axes, after)
                if len(axes) == 1 and is_partial(self.target[axes[0]], "sum"):
                    yield self._step("spread", state, axes, self.target[axes[0]])
            elif len(axes) == 1:
                for after in self._new_shards(state, axes):
                    yield self._step("cut", state, axes, after)
                if is_partial(self.target[axes[0]]):
                    yield self._step("assign", state, axes, self.target[axes[0]])

    def _axes_that_move_together(self, state: Placements) -> Iterator[tuple[int, ...]]:
        by_placement: dict[Placement, list[int]] = {}
        for axis, placement in enumerate(state):
            by_placement.setdefault(placement, []).append(axis)
        for placement, axes in by_placement.items():
            if shard_dim(placement) is not None:
                yield from (tuple(axes[first:]) for first in range(len(axes)))
            else:
                for count in range(1, len(axes) + 1):
                    yield from itertools.combinations(axes, count)

    def _new_shards(self, state: Placements, axes: tuple[int, ...]) -> Iterator[Placement]:
        for dim in self.dims:
            holders = [axis for axis, placement in enumerate(state) if shard_dim(placement) == dim and axis not in axes]
            if not holders or holders[-1] < axes[0]:
                yield Shard(dim)

    def _step(self, kind: str, state: Placements, axes: tuple[int, ...], after: Placement) -> Step:
        ranks = math.prod(self.mesh_shape[axis] for axis in axes)
        held = self._held(state)
        received = {
            "all_gather": held * (ranks - 1),
            "all_reduce": 2 * held * (ranks - 1) / ranks,
            "reduce_scatter": held * (ranks - 1) / ranks,
            "all_to_all": held * (ranks - 1) / ranks,
        }.get(kind, 0.0)
        return Step(kind, axes, state[axes[0]], after, received)

    def _held(self, state: Placements) -> int:
        """The most bytes that any rank holds in a state."""
        sizes = list(self.shape)
        for axis, placement in enumerate(state):
            dim = shard_dim(placement)
            if dim is not None:
                sizes[dim] = -(-sizes[dim] // self.mesh_shape[axis])
        return math.prod(sizes) * self.itemsize
