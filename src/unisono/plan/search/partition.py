"""Stage boundaries of pipelines.

Ranks that are given no boundaries balance stages by parameters (`parallel.pipeline.split`); a plan without boundaries
is judged by that split, because it will run so. The search looks for stages that take equally long instead, and a plan
that it finds carries their boundaries where ranks alone would split elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.plan.cost.memory import local_elements
from unisono.plan.cost.time import TimeModel
from unisono.plan.plan import Plan
from unisono.plan.profile.model_profile import ModelProfile
from unisono.plan.profile.stages import Stages
from unisono.plan.schedules.schedule import stage_placement
from unisono.plan.search.balance import balanced, checked, quickly_balanced, require_enough

Balance = Callable[[Sequence[float], int], tuple[int, ...]]  # (cost of each block, stages) -> first block of each stage


@dataclass
class Partitioner:
    """Splits the pipelines of one profile, each kind once."""

    profile: ModelProfile
    time: TimeModel
    _made: dict[tuple[object, ...], Stages] = field(default_factory=dict)
    _starts: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)

    def as_run(self, plan: Plan) -> Stages:
        """As the plan says, else as ranks split it by themselves."""
        key: tuple[object, ...] = (plan.pp, chunks_of(plan), plan.schedule == "zbv", plan.boundaries)
        if plan.pp > 1 and not plan.boundaries:
            key += (plan.tp, plan.ep)
        if key not in self._made:
            self._made[key] = self._stages(plan, self._as_given(plan))
        return self._made[key]

    def evened(self, plan: Plan) -> Stages:
        """So that stages take equally long, whatever boundaries the plan has."""
        if plan.pp == 1:
            return self.as_run(plan)
        shape = (plan.pp, chunks_of(plan), plan.schedule == "zbv")
        key = ("evened", *shape, plan.tp, plan.cp, plan.sequence, plan.recompute, plan.microbatches * plan.dp)
        if key not in self._made:
            made = self._stages(plan, self._by_time(plan))
            if self.profile.has_bare_blocks and not made.all_hold_parameters:
                made = self.as_run(plan.but(boundaries=()))
            self._made[key] = made
        return self._made[key]

    def _stages(self, plan: Plan, starts: tuple[int, ...]) -> Stages:
        return Stages(self.profile, starts, stage_placement(plan.pp, chunks_of(plan), plan.schedule == "zbv"))

    def _as_given(self, plan: Plan) -> tuple[int, ...]:
        blocks, stages = self.profile.blocks, plan.pp * chunks_of(plan)
        if plan.boundaries:
            return checked(plan.boundaries, len(blocks), stages)
        if stages == 1:
            return (0,)
        require_enough(len(blocks), stages, self.profile.name)
        costs = [local_elements(block.weights, plan) for block in blocks]
        costs[0] = local_elements((*self.profile.before.weights, *blocks[0].weights), plan)
        costs[-1] = local_elements((*blocks[-1].weights, *self.profile.after.weights), plan)
        return self._split(balanced, stages, costs)

    def _by_time(self, plan: Plan) -> tuple[int, ...]:
        blocks, stages = self.profile.blocks, plan.pp * chunks_of(plan)
        require_enough(len(blocks), stages, self.profile.name)
        of_kinds = {id(block): self.time.cost(block, plan).both for block in set(blocks)}
        costs = [of_kinds[id(block)] for block in blocks]
        unit = min((cost for cost in costs if cost), default=1.0)
        ends = (self.time.cost(self.profile.before, plan).both, self.time.cost(self.profile.after, plan).both)
        # In twentieths of a block: settings that differ by less are split alike.
        rounded = [round(cost / unit, 2) for cost in costs]
        rounded[0] += round(ends[0] / unit * 20) / 20
        rounded[-1] += round(ends[1] / unit * 20) / 20
        return self._split(quickly_balanced, stages, rounded)

    def _split(self, how: Balance, stages: int, costs: Sequence[float]) -> tuple[int, ...]:
        key = (how, stages, *costs)
        if key not in self._starts:
            self._starts[key] = how(costs, stages)
        return self._starts[key]


def chunks_of(plan: Plan) -> int:
    """Stages that a rank of the pipeline holds."""
    return max(plan.chunks, 2) if plan.schedule in ("interleaved", "zbv") else 1
