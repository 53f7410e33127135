"""The communication of a rank at one point of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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


_LISTED = 8  # ranks, or ranges of ranks, that are written out


def ranks_text(ranks: Sequence[int], separator: str = ",") -> str:
    """The ranks of a group; more than 8 as ranges: `0-1023`, `644-700 step 8`, `0-3,16-19,...,1008-1011`."""
    if len(ranks) <= _LISTED:
        return separator.join(map(str, ranks))
    ranges = _ranges(ranks)
    texts = [_range_text(each) for each in ranges]
    shifts = {(after.start - before.start, len(before), before.step) for before, after in pairwise(ranges)}
    if len(ranges) > _LISTED and len(shifts) == 1 and len(ranges[-1]) == len(ranges[0]):
        texts = [*texts[:2], "...", texts[-1]]
    return separator.join(texts)


def _ranges(ranks: Sequence[int]) -> list[range]:
    """Consecutive ranks with a constant distance as ranges; ranks one apart first, so that 0,1,2,8,9,10 are two."""
    found: list[range] = []
    step = 1 if any(after - before == 1 for before, after in pairwise(ranks)) else max(1, ranks[1] - ranks[0])
    for rank in ranks:
        if found and rank == found[-1].stop:
            found[-1] = range(found[-1].start, rank + step, step)
        else:
            found.append(range(rank, rank + step, step))
    return found


def _range_text(ranks: range) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    return f"{ranks[0]}-{ranks[-1]}" + (f" step {ranks.step}" if ranks.step > 1 else "")
