"""How many ranks share one state, and what the others do."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.arguments import require_comm, require_count


@dataclass(frozen=True)
class RankGroup:
    """`comm` is the group of 2^global_qubits ranks that share one state, this rank among them; None where that is one
    rank.

    There are `groups` such groups, for different samples of a batch; this rank is in number `group`, or, being surplus,
    in none (-1). `note` has what is unusual, or is empty."""

    comm: Communicator | None
    global_qubits: int
    groups: int
    group: int
    note: str = ""


class Grid(Protocol):
    """What is needed of a mesh: the communicator of the ranks along some of its axes."""

    def comm(self, *names: str) -> Communicator: ...


def share_grid(grid: Grid, wires: int, batch_axis: str, state_axis: str) -> RankGroup:
    """Ranks along `state_axis` share each state, those along `batch_axis` the samples of a batch."""
    if not callable(getattr(grid, "comm", None)):
        raise UsageError(f"mesh of type {type(grid).__name__}: expected a uni.Mesh, or anything with comm(*axes)")
    if batch_axis == state_axis:
        raise UsageError(f"batch_axis and state_axis are both {batch_axis!r}: expected two axes of the mesh")
    states, samples = grid.comm(state_axis), grid.comm(batch_axis)
    global_qubits = states.size.bit_length() - 1
    if states.size != 1 << global_qubits or global_qubits > wires:
        raise UsageError(
            f"axis {state_axis!r} has {states.size} ranks for a state of {wires} wires: expected a power of two of at "
            f"most {2**wires}"
        )
    return RankGroup(states if global_qubits else None, global_qubits, samples.size, samples.rank)


def share(comm: Communicator | None, wires: int, *, batch: int = 1, narrowest: int = 1, warn: bool = True) -> RankGroup:
    """Spread states of `wires` wires over all ranks, or over as many as a power of two allows.

    A rank keeps at least `narrowest` wires. With a batch, a number of ranks that is no power of two makes several
    groups, each with its own samples, so that no rank is idle. Rank 0 warns of what is unusual."""
    size = 1 if require_comm(comm) is None else comm.size  # type: ignore[union-attr]
    for name, value, least in (("wires", wires, 1), ("batch", batch, 0), ("narrowest", narrowest, 0)):
        require_count(name, value, least)
    most = min(size.bit_length() - 1, max(0, wires - narrowest))
    global_qubits = most
    if batch > 1:
        while global_qubits and size % 2**global_qubits:
            global_qubits -= 1
    width = 2**global_qubits
    groups = min(size // width, max(1, batch))
    note = ""
    if groups * width < size:
        used = groups * width
        note = f"{used} of {size} ranks share the state (a power of two, as its wires allow); the others are idle"
    elif groups > 1:
        note = f"{size} ranks in {groups} groups of {width}: each group simulates its own samples of the batch"
    if comm is None or size == 1:
        return RankGroup(None, 0, 1, 0)
    if note and warn and comm.rank == 0:
        warnings.warn(note, stacklevel=2)
    if width == size:
        return RankGroup(comm, global_qubits, 1, 0, note)
    mine = comm.split([list(range(g * width, (g + 1) * width)) for g in range(groups)]) if width > 1 else None
    group = comm.rank // width
    return RankGroup(mine, global_qubits, groups, group if group < groups else -1, note)
