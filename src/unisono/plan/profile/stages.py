"""Which segments of a model each rank of a pipeline holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from unisono.plan.profile.model_profile import ModelProfile, Segment


@dataclass(frozen=True, eq=False)
class Stages:
    """A model split at `starts`, the first block of each stage; `placement` has the rank of each stage."""

    profile: ModelProfile
    starts: tuple[int, ...]
    placement: tuple[int, ...]
    _counted: dict[int, tuple[tuple[Segment, int], ...]] = field(default_factory=dict)
    _of_ranks: dict[int, tuple[tuple[Segment, int], ...]] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def chunks(self) -> int:
        return len(self.placement) // self.ranks

    @cached_property
    def spans(self) -> tuple[range, ...]:
        ends = (*self.starts[1:], len(self.profile.blocks))
        return tuple(range(low, high) for low, high in zip(self.starts, ends, strict=True))

    def segments_of_stage(self, stage: int) -> tuple[tuple[Segment, int], ...]:
        """With how often each occurs."""
        if stage not in self._counted:
            counted = Counter(self.profile.blocks[block] for block in self.spans[stage])
            if stage == 0:
                counted[self.profile.before] += 1
            if stage == len(self.placement) - 1:
                counted[self.profile.after] += 1
            self._counted[stage] = tuple(counted.items())
        return self._counted[stage]

    @cached_property
    def kinds(self) -> tuple[list[tuple[tuple[Segment, int], ...]], list[int]]:
        """The stages that differ, and for each stage the number of its kind."""
        positions: dict[tuple[tuple[int, int], ...], int] = {}
        kinds: list[tuple[tuple[Segment, int], ...]] = []
        numbers = []
        for stage in range(len(self.placement)):
            counted = self.segments_of_stage(stage)
            key = tuple((id(segment), count) for segment, count in counted)
            if key not in positions:
                positions[key] = len(kinds)
                kinds.append(counted)
            numbers.append(positions[key])
        return kinds, numbers

    def segments_of(self, rank: int) -> tuple[tuple[Segment, int], ...]:
        """All that a rank holds, with how often each occurs."""
        if rank not in self._of_ranks:
            counted: Counter[Segment] = Counter()
            for stage, holder in enumerate(self.placement):
                if holder == rank:
                    counted.update(dict(self.segments_of_stage(stage)))
            self._of_ranks[rank] = tuple(counted.items())
        return self._of_ranks[rank]

    def holds_both_ends(self, rank: int) -> bool:
        return self.placement[0] == self.placement[-1] == rank

    @cached_property
    def all_hold_parameters(self) -> bool:
        """A rank without any would have nothing to optimize, and is refused where the pipeline is made."""
        return all(any(s.weights for s, _ in self.segments_of(rank)) for rank in range(self.ranks))

    @cached_property
    def critical_ranks(self) -> tuple[int, ...]:
        """The ranks of which one needs most: both ends, the second, and the one with most blocks."""
        blocks: Counter[int] = Counter()
        for stage, rank in enumerate(self.placement):
            blocks[rank] += len(self.spans[stage])
        longest = max(range(self.ranks), key=lambda rank: (blocks[rank], -rank))
        return tuple(sorted({0, min(1, self.ranks - 1), self.ranks - 1, longest}))
