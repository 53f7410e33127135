"""What collectives take: alpha-beta, for a group of ranks that may cross nodes.

A ring of n ranks passes n-1 chunks of 1/n of the bytes, so with latency a and bandwidth b

    all-gather, reduce-scatter      (n-1) a + (n-1)/n bytes / b        all-reduce     twice that
    all-to-all                      (n-1) a + (n-1)/n bytes / b        send           a + bytes / b

Where a group crosses nodes, the slowest link is that between nodes; of a group with k ranks a node, k adapters carry
it. Latency grows with the logarithm beyond a node, since libraries change to trees there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from unisono.plan.hardware.spec import Curve, Hardware, Link, seconds_at
from unisono.plan.plan import AXES, Plan

_BETWEEN_TWO = ("send", "exchange")  # whose time does not depend on the number of ranks


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how."""

    ranks: int
    bandwidth: float
    latency: float  # of one collective's steps, all together
    crosses: bool
    measured: tuple[tuple[str, Curve], ...] = ()

    def all_reduce(self, size: float) -> float:
        """`size`: of what each rank has."""
        return self._seconds("all_reduce", size, 2.0)

    def all_gather(self, size: float) -> float:
        """`size`: of the full tensor that each rank has afterwards."""
        return self._seconds("all_gather", size, 1.0)

    def reduce_scatter(self, size: float) -> float:
        """`size`: of the full tensor that each rank gives."""
        return self._seconds("reduce_scatter", size, 1.0)

    def all_to_all(self, size: float) -> float:
        return self._seconds("all_to_all", size, 1.0)

    def send(self, size: float) -> float:
        for name, curve in self.measured:
            if name == "send":
                return seconds_at(curve, size)
        return self.latency / max(self.ranks - 1, 1) + size / self.bandwidth

    def exchange(self, size: float) -> float:
        """`size`: of what each rank sends to its right while it receives as much from its left."""
        for name, curve in self.measured:
            if name == "exchange":
                return seconds_at(curve, size)
        return self.send(size)

    def _seconds(self, op: str, size: float, rounds: float) -> float:
        if self.ranks == 1 or size <= 0:
            return 0.0
        for name, curve in self.measured:
            if name == op:
                return seconds_at(curve, size)
        return rounds * (self.latency + (self.ranks - 1) / self.ranks * size / self.bandwidth)


def group(hardware: Hardware, plan: Plan, *axes: str) -> Group:
    """The ranks along some axes of the plan's mesh, which are neighbours on it."""
    return _group(hardware.intra_node, hardware.inter_node, hardware.devices_per_node, plan.shape, axes)


@lru_cache(maxsize=4096)
def _group(intra: Link, inter: Link, per_node: int, shape: tuple[int, ...], axes: tuple[str, ...]) -> Group:
    sizes = dict(zip(AXES, shape, strict=True))
    ranks = stride = 1
    reached = False
    for axis in reversed(AXES):
        if axis in axes:
            ranks *= sizes[axis]
            reached = True
        elif not reached:
            stride *= sizes[axis]
    together = ranks if stride * ranks <= per_node else max(1, min(ranks, per_node // stride))
    return _linked(intra, inter, ranks, together)


def group_of(hardware: Hardware, ranks: tuple[int, ...]) -> Group:
    """These ranks of the world."""
    nodes = len({rank // hardware.devices_per_node for rank in ranks})
    return _linked(hardware.intra_node, hardware.inter_node, len(ranks), max(len(ranks) // nodes, 1))


@lru_cache(maxsize=4096)
def _linked(intra: Link, inter: Link, ranks: int, together: int) -> Group:
    """So many ranks, of which `together` are on one node."""
    if together == ranks:
        measured = tuple(each for each in intra.measured if ranks == intra.ranks or each[0] in _BETWEEN_TWO)
        return Group(ranks, intra.bandwidth, (ranks - 1) * intra.latency, False, measured)
    bandwidth = min(intra.bandwidth, inter.bandwidth * together)
    steps = max(1.0, log2(ranks / together)) if ranks > 1 else 0.0
    return Group(ranks, bandwidth, (together - 1) * intra.latency + 2 * steps * inter.latency, True)
