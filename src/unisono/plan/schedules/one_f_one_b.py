"""One forward, one backward: a rank starts no new forward before it has paid for an old one with a backward.

The bubble of 1F1B is that of f-then-b, but a rank keeps the activations of at most p microbatches instead of m
(p = 4, m = 6, a backward drawn as long as a forward):

    rank 0   F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 .. B3 .. B4 .. B5
    rank 1   .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5 ..
    rank 2   .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 .. B5 .. ..
    rank 3   .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .. .. ..

Interleaved: each rank holds v chunks of the model instead of one (stage s on rank s mod p), so that a chunk's work,
and with it every gap of the picture, is v times shorter: bubble over useful work falls from (p-1)/m to (p-1)/(v m).
The price is v times the transfers and some more activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from unisono.plan.schedules.action import Action, Lists


def one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Lists:
    """Rank r runs p-1-r forwards ahead, so that its first gradient comes just when it has nothing else to do."""
    lists = []
    for rank in range(ranks):
        forwards = [Action("F", rank, j) for j in range(microbatches)]
        backwards = [Action("B", rank, j) for j in range(microbatches)]
        lists.append(alternate(forwards, backwards, ahead=ranks - 1 - rank))
    return tuple(lists)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Lists:
    """Microbatches go in groups, and a group passes a rank's first chunk, then its second, and so on.

    A group of at least p microbatches keeps a rank busy until the group's first one has gone round all ranks and is
    back for the next chunk. p of them would do; where p does not divide m the rest is spread over the groups instead
    of being left as a short group that could not hide the round. With m < p the one group has to be short.

    How far forwards run ahead of backwards: (v-1) chunks of a whole group, for the first backward belongs to the
    last chunk, and then 2(p-1-r) steps, for a microbatch goes down to the last rank and comes back up.
    """
    if chunks == 1:
        return one_f_one_b(ranks, microbatches, chunks)
    groups = split_evenly(microbatches, max(1, microbatches // ranks))
    longest = max(len(group) for group in groups)
    lists = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action("F", stage, j) for group in groups for stage in stages for j in group]
        backwards = [Action("B", stage, j) for group in groups for stage in reversed(stages) for j in group]
        lists.append(alternate(forwards, backwards, ahead=(chunks - 1) * longest + 2 * (ranks - 1 - rank)))
    return tuple(lists)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    order = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += (forward, backward)
    return (*order, *backwards[len(forwards) - ahead :])


def split_evenly(count: int, parts: int) -> list[range]:
    """0..count-1 as `parts` runs whose lengths differ by at most one, the longer ones first."""
    length, longer = divmod(count, parts)
    starts = [part * length + min(part, longer) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
