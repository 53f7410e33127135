"""When each action of a schedule happens, given what actions cost.

A rank takes its actions in order and starts each as soon as it is free and what the action needs has arrived; a
transfer delays what crosses ranks and keeps nobody busy. So for action a on rank r

    start(a) = max(end of the action before a on r, end(n) + transfer if n ran elsewhere else end(n), for n in needs(a))

Two lengths of a step follow. `makespan` runs from the first start to the last end: what a step takes when all ranks
meet at its end, as clipping by the global gradient norm makes them. `period` is the longest time that one rank needs
from its own first start to its own last end: what each further step adds when every rank begins the next one as soon
as it has ended this one. They differ where ranks that start late also end late, which is how zbv has no bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.plan.schedules.action import Action
from unisono.plan.schedules.schedule import Schedule, in_order

Cost = float | Sequence[float]  # for every stage, or one for each


@dataclass(frozen=True)
class Costs:
    """How long actions take, in any unit. The default is the papers': F = I = W = 1 and B is both halves."""

    forward: Cost = 1
    backward: Cost = 2
    inputs: Cost = 1
    weights: Cost = 1
    transfer: float = 0  # latency between two ranks

    def of(self, action: Action) -> float:
        cost = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}[action.kind]
        return cost[action.stage] if isinstance(cost, Sequence) else cost

    def check(self, stages: int) -> None:
        for name, cost in vars(self).items():
            each = cost if isinstance(cost, Sequence) else (cost,)
            if isinstance(cost, Sequence) and len(cost) != stages:
                raise UsageError(f"{name} has {len(cost)} costs, but the schedule has {stages} stages; give one each")
            if not all(0 <= one < inf for one in each):
                raise UsageError(f"{name} costs {cost}; a cost is a time, 0 or more")
        if not any(self.forward if isinstance(self.forward, Sequence) else (self.forward,)):
            raise UsageError("forward costs 0 on every stage; give the time that a forward takes")


class Span(NamedTuple):
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time; `spans` holds, for each rank, its actions in order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end on any rank."""
        return max(spans[-1].end for spans in self.spans)

    @cached_property
    def period(self) -> float:
        """The longest time that a rank spends from its first start to its last end."""
        return max(spans[-1].end - spans[0].start for spans in self.spans)

    def busy(self, rank: int) -> float:
        """The time that a rank spends on its actions."""
        return sum(span.end - span.start for span in self.spans[rank])

    @cached_property
    def useful(self) -> float:
        """The time that all ranks together spend on their actions."""
        return sum(self.busy(rank) for rank in range(self.schedule.ranks))

    def bubble_fraction(self, rank: int | None = None, *, barrier: bool = True) -> float:
        """The share of its time that a rank, or all of them, stands idle.

        With a barrier at the step's end that time is `makespan`, else `period`.
        """
        length = self.makespan if barrier else self.period
        if rank is not None:
            return (length - self.busy(rank)) / length
        return (length * self.schedule.ranks - self.useful) / (length * self.schedule.ranks)

    def bubble_over_useful(self, *, barrier: bool = True) -> float:
        """Idle time over useful time, all ranks together."""
        length = self.makespan if barrier else self.period
        return (length * self.schedule.ranks - self.useful) / self.useful


def timeline(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Play a schedule: the start and end of every action on every rank."""
    costs = costs or Costs()
    costs.check(schedule.stages)
    ends: dict[Action, float] = {}
    free: list[float] = [0] * schedule.ranks
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for rank, action in in_order(schedule):
        start = free[rank]
        for need in schedule.needs(action):
            away = schedule.placement[need.stage] != rank
            start = max(start, ends[need] + costs.transfer if away else ends[need])
        free[rank] = ends[action] = start + costs.of(action)
        spans[rank].append(Span(action, start, ends[action]))
    return Timeline(schedule, tuple(map(tuple, spans)))
