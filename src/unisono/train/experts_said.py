"""What ranks say inside a mixture of experts, when tokens visit all experts alike.

    forward    for the auxiliary loss, an all_reduce of how many visits each expert has; for a capacity, an all_gather
               where experts are spread, three all_to_all: how many rows come, the rows to the ranks that have their
               experts, and what these made of them back
    backward   the gradients of the rows go the same two ways, in the other direction

Visits beyond an expert's capacity are not made. It is reached in the order of choices, and of one choice in the order
of ranks, so some ranks may send less than others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import torch

from unisono.graph.beside import Inside
from unisono.graph.lowering import Compute, Lowered
from unisono.graph.mixture import EXPERTS, is_mixture
from unisono.graph.rules.call import Call
from unisono.graph.talk import Shape, Talk
from unisono.mesh.placement import shard_dim
from unisono.train.experts_shown import AXIS

_COUNT = torch.int64.itemsize
_ALIKE = "experts: sizes of what is said for them are those of tokens that visit all experts alike"
_AUXILIARY = "experts: not shown is their auxiliary loss, which each rank adds to its part of the loss"


def show_experts(parts: Sequence[Lowered], rank: int) -> None:
    """Write into the programs of a rank's stages what is said in their mixtures of experts."""
    for part in parts:
        mixtures = [each for each in part.computes if is_mixture(each.node)]
        for each in mixtures:
            part.beside.inside[each.name] = _Visits(each, part, rank).said()
        if mixtures and AXIS in part.mesh.names:
            part.beside.about.append(_ALIKE)
        if any(Call(each.node)["aux_weight"] for each in mixtures):
            part.beside.about.append(_AUXILIARY)


class _Visits:
    """Those of one mixture, as a rank sees them."""

    def __init__(self, compute: Compute, lowered: Lowered, rank: int) -> None:
        self._mesh, self._rank = lowered.mesh, rank
        self._call = call = Call(compute.node)
        laid = dict(zip(call.names, (lowered.values[name] for name in compute.inputs), strict=True))
        self._dtype = laid["x"].dtype
        *tokens, self._width = laid["x"].local(lowered.mesh, rank)
        self._tokens = math.prod(tokens)
        self._experts = laid["up"].shape[0]
        self._sharing, self._owners = (  # the axes along which ranks have other tokens, and other experts
            tuple(
                name
                for name, placement in zip(lowered.mesh.names, laid[each].placements, strict=True)
                if shard_dim(placement) is not None
            )
            for each in ("x", "up")
        )
        tracked = {
            name for name, given in zip(call.names, call.tensors, strict=True) if given.name in lowered.trace.tracked
        }
        self._are_rows_tracked = "x" in tracked
        self._are_outcomes_tracked = bool(tracked.intersection(("x", *EXPERTS)))

    def said(self) -> Inside:
        words = f"experts over {', '.join(self._owners)}" if self._owners else ""
        return Inside(words, tuple(self._forward()), tuple(self._backward()))

    def _forward(self) -> Iterator[Talk]:
        choices = self._call["top_k"] * self._experts
        if self._call["aux_weight"] and self._sharing:
            yield self._counts("all_reduce", self._sharing, self._experts + 1, "sum, counts of visits and tokens")
        if self._call["capacity_factor"] is not None and self._sharing:
            yield self._counts("all_gather", self._sharing, choices + 1, "counts of visits and tokens")
        if self._owners:
            yield self._counts("all_to_all", self._owners, self._experts, "how many rows come")
            yield self._rows("rows to their experts", is_back=False)
            yield self._rows("what experts made of them", is_back=True)

    def _backward(self) -> Iterator[Talk]:
        if self._owners and self._are_outcomes_tracked:
            yield self._rows("gradients of what experts made", is_back=False)
        if self._owners and self._are_rows_tracked:
            yield self._rows("gradients of rows", is_back=True)

    def _counts(self, kind: str, axes: tuple[str, ...], count: int, words: str) -> Talk:
        ranks = self._mesh.along(*axes, rank=self._rank)
        others = len(ranks) - 1
        of_a_count = {"all_reduce": 2 * others / len(ranks), "all_gather": others, "all_to_all": others / len(ranks)}
        after = count * (len(ranks) if kind == "all_gather" else 1)
        return Talk(kind, axes, ranks, round(count * _COUNT * of_a_count[kind]), (count,), (after,), words, True)

    def _rows(self, words: str, *, is_back: bool) -> Talk:
        """From each of the ranks, the same share goes to each; a rank's own stays."""
        ranks = self._mesh.along(*self._owners, rank=self._rank)
        mine, theirs = self._made(self._rank), sum(self._made(rank) for rank in ranks if rank != self._rank)
        here: Shape = (round(mine), self._width)
        there: Shape = (round((mine + theirs) / len(ranks)), self._width)
        coming = mine * (len(ranks) - 1) if is_back else theirs
        received = round(coming / len(ranks) * self._width * self._dtype.itemsize)
        before, after = (there, here) if is_back else (here, there)
        return Talk("all_to_all", self._owners, ranks, received, before, after, words, True)

    def _made(self, rank: int) -> Fraction:
        """How many visits the tokens of a rank make."""
        choices, factor = self._call["top_k"], self._call["capacity_factor"]
        if factor is None:
            return Fraction(self._tokens * choices)
        sharing = self._mesh.size(*self._sharing) if self._sharing else 1
        place = self._mesh.index(*self._sharing, rank=rank) if self._sharing else 0
        capacity = math.ceil(factor * choices * self._tokens * sharing / self._experts)
        each = Fraction(self._tokens, self._experts)  # visits of a choice, from a rank to an expert
        left = (capacity - (choice * sharing + place) * each for choice in range(choices))
        return self._experts * sum((min(max(room, Fraction(0)), each) for room in left), Fraction(0))
