"""The route from one list of placements to another: which steps, in which order, at the least cost.

A state is a list of placements. A step changes the placement of one axis, or of several axes at once where one group
can serve them together, and costs what a rank receives:

    step            changes                  receives, of N bytes held locally before it, in a group of n
    all_gather      Shard(d)  -> Replicate   N (n - 1)
    all_reduce      Partial   -> Replicate   2 N (n - 1) / n
    reduce_scatter  Partial   -> Shard(d)    N (n - 1) / n
    all_to_all      Shard(d)  -> Shard(e)    N (n - 1) / n
    slice           Replicate -> Shard(d)    nothing
    pad             Shard(d) -> Partial     nothing: each rank's shard, in zeros
    assign          Replicate -> Partial     nothing: one rank keeps the value

The cheapest route is a shortest path over states (Dijkstra's). Where several axes shard one dim, the shards of a later
axis are within those of an earlier one, so only the last of them may let go of the dim, and a new one comes last.
Nothing here communicates, and nothing depends on which rank asks: all ranks find the same route.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard

from unisono.mesh.placement import Placement, Placements, is_partial, shard_dim

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
STEP_COST = 16384.0  # what a collective costs besides its bytes, in bytes
LOCAL_COST = 1.0  # distinguishes routes that communicate equally little


@dataclass(frozen=True)
class RouteStep:
    """One change of placement on `axes` (numbers of the mesh's axes, rising)."""

    kind: str
    axes: tuple[int, ...]
    before: Placement
    after: Placement
    received: float  # bytes that a rank receives

    @property
    def communicates(self) -> bool:
        return self.kind in COLLECTIVES

    @property
    def cost(self) -> float:
        return self.received + (STEP_COST if self.communicates else LOCAL_COST)


@lru_cache(maxsize=65536)
def find_route(
    shape: tuple[int, ...], itemsize: int, mesh_shape: tuple[int, ...], source: Placements, target: Placements
) -> tuple[RouteStep, ...]:
    """The cheapest steps that bring a tensor of that full shape from `source` to `target` on a mesh."""
    if source == target:
        return ()
    return _Search(shape, itemsize, mesh_shape, source, target).run()


_WHOLE = -1  # Replicate as a number; a shard is its dim, and a sum in parts some number below this one
State = tuple[int, ...]


class _Change(NamedTuple):
    """A step in numbers."""

    kind: str
    axes: tuple[int, ...]
    after: int
    received: float


class _Search:
    """Dijkstra's, over placements as numbers: thousands of routes are compared to assign placements to a model's
    tensors."""

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
        self.partial = list(dict.fromkeys(p for p in (*source, *target) if isinstance(p, Partial)))
        self.source, self.target = self._numbers(source), self._numbers(target)
        used = {number for number in (*self.source, *self.target) if number > _WHOLE}
        # One dim more to step aside to, where axes are in each other's way on a dim that both shard.
        aside = sorted(set(range(len(shape))) - used, key=lambda dim: shape[dim])[-1:]
        self.dims = sorted(used) + aside

    def _numbers(self, placements: Placements) -> State:
        return tuple(
            dim
            if (dim := shard_dim(p)) is not None
            else _WHOLE - 1 - self.partial.index(p)
            if isinstance(p, Partial)
            else _WHOLE
            for p in placements
        )

    def _placement(self, number: int) -> Placement:
        if number > _WHOLE:
            return Shard(number)
        return Replicate() if number == _WHOLE else self.partial[_WHOLE - 1 - number]

    def run(self) -> tuple[RouteStep, ...]:
        ticket = itertools.count()  # of routes that cost the same, the first
        frontier: list[tuple[float, int, State, tuple[_Change, ...]]] = [(0.0, next(ticket), self.source, ())]
        settled: set[State] = set()
        while frontier:
            cost, _, state, route = heapq.heappop(frontier)
            if state == self.target:
                return self._steps_of(route)
            if state in settled:
                continue
            settled.add(state)
            for change in self._changes(state):
                reached = _after(state, change)
                if reached not in settled:
                    spent = change.received + (STEP_COST if change.kind in COLLECTIVES else LOCAL_COST)
                    heapq.heappush(frontier, (cost + spent, next(ticket), reached, (*route, change)))
        raise AssertionError(f"no route from {self.source} to {self.target}")  # all can be gathered, then sharded

    def _steps_of(self, route: tuple[_Change, ...]) -> tuple[RouteStep, ...]:
        steps, state = [], self.source
        for change in route:
            before, after = self._placement(state[change.axes[0]]), self._placement(change.after)
            steps.append(RouteStep(change.kind, change.axes, before, after, change.received))
            state = _after(state, change)
        return tuple(steps)

    def _changes(self, state: State) -> Iterator[_Change]:
        """All that can be done next."""
        held = self._held(state)
        for axes in _axes_that_move_together(state):
            before, wanted = state[axes[0]], self.target[axes[0]]
            ranks = math.prod([self.mesh_shape[axis] for axis in axes])
            shared = held * (ranks - 1) / ranks
            if before < _WHOLE:
                yield _Change("all_reduce", axes, _WHOLE, 2 * shared)
                for dim in self._free_dims(state, axes):
                    yield _Change("reduce_scatter", axes, dim, shared)
            elif before > _WHOLE:
                yield _Change("all_gather", axes, _WHOLE, held * (ranks - 1))
                for dim in self._free_dims(state, axes):
                    if dim != before:
                        yield _Change("all_to_all", axes, dim, shared)
                if len(axes) == 1 and wanted < _WHOLE and is_partial(self._placement(wanted), "sum"):
                    yield _Change("pad", axes, wanted, 0.0)
            elif len(axes) == 1:
                for dim in self._free_dims(state, axes):
                    yield _Change("slice", axes, dim, 0.0)
                if wanted < _WHOLE:
                    yield _Change("assign", axes, wanted, 0.0)

    def _free_dims(self, state: State, axes: tuple[int, ...]) -> Iterator[int]:
        """Dims that these axes may shard: those that no later axis shards."""
        for dim in self.dims:
            if not any(state[axis] == dim and axis not in axes for axis in range(axes[0], len(state))):
                yield dim

    def _held(self, state: State) -> int:
        """The most bytes that any rank holds in a state."""
        sizes = list(self.shape)
        for axis, number in enumerate(state):
            if number > _WHOLE:
                sizes[number] = -(-sizes[number] // self.mesh_shape[axis])
        return math.prod(sizes) * self.itemsize


def _after(state: State, change: _Change) -> State:
    return tuple([change.after if axis in change.axes else old for axis, old in enumerate(state)])


def _axes_that_move_together(state: State) -> Iterator[tuple[int, ...]]:
    by_placement: dict[int, list[int]] = {}
    for axis, number in enumerate(state):
        by_placement.setdefault(number, []).append(axis)
    for number, axes in by_placement.items():
        if number > _WHOLE:
            yield from (tuple(axes[first:]) for first in range(len(axes)))
        else:
            for count in range(1, len(axes) + 1):
                yield from itertools.combinations(axes, count)
