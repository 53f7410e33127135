"""How many ranks share one state, and what the others do."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from unisono.comm.communicator import Communicator


@dataclass(frozen=True)
class Share:
    """`comm` is the group of 2^held ranks that share one state, this rank among them; None where that is one rank.

    There are `groups` such groups, for different samples of a batch; this rank is in number `group`, or, being surplus,
    in none (-1). `note` says what is unusual, or is empty."""

    comm: Communicator | None
    held: int
    groups: int
    group: int
    note: str = ""


def share(comm: Communicator | None, wires: int, *, batch: int = 1, narrowest: int = 1) -> Share:
    """Spread states of `wires` wires over all ranks, or over as many as a power of two allows.

    A rank keeps at least `narrowest` wires. With a batch, a number of ranks that is no power of two makes several
    groups, each with its own samples, so that no rank is idle."""
    size = 1 if comm is None else comm.size
    most = min(size.bit_length() - 1, max(0, wires - narrowest))
    held = most
    if batch > 1:
        while held and size % 2**held:
            held -= 1
    width = 2**held
    groups = min(size // width, max(1, batch))
    note = ""
    if groups * width < size:
        used = groups * width
        note = f"{used} of {size} ranks share the state (a power of two, as its wires allow); the others are idle"
    elif groups > 1:
        note = f"{size} ranks in {groups} groups of {width}: each group simulates its own samples of the batch"
    if comm is None or size == 1:
        return Share(None, 0, 1, 0)
    if note and comm.rank == 0:
        warnings.warn(note, stacklevel=2)
    if width == size:
        return Share(comm, held, 1, 0, note)
    mine = comm.split([list(range(g * width, (g + 1) * width)) for g in range(groups)]) if width > 1 else None
    group = comm.rank // width
    return Share(mine, held, groups, group if group < groups else -1, note)
