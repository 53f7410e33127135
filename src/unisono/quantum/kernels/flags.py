"""Counters in memory that processes share: how ranks of a host tell each other how far they are."""

from __future__ import annotations

from unisono.quantum.kernels.compiling import entry
from unisono.quantum.kernels.vector import fetch, fetch_add, give_way

_SPINS = 200  # before other threads may run


@entry()
def advance(counters, index):  # type: ignore[no-untyped-def]
    """Add one; whoever sees it sees what was written before."""
    fetch_add(counters, index, 1)


@entry()
def reached(counters, index, goal, looks):  # type: ignore[no-untyped-def]
    """Whether the counter comes to `goal` within so many looks."""
    for look in range(looks):
        if fetch(counters, index) >= goal:
            return True
        if look > _SPINS:
            give_way()
    return False
