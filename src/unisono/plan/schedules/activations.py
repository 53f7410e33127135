"""What a schedule keeps in memory between a forward and its backward.

A forward makes the activations of one microbatch at one stage. A whole backward B frees them when it ends. A backward
in halves frees a part when I ends and keeps the rest, the inputs of the layers that have weights, until W ends.
Since only a rank's own actions change what it keeps, peaks depend on the order of actions and not on their times.

Not counted: weights, gradients and optimizer state, and what is under way between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.plan.schedules.action import Action
from unisono.plan.schedules.schedule import Schedule
from unisono.plan.schedules.timeline import Timeline


@dataclass(frozen=True)
class Sizes:
    """The size of one microbatch's activations, in any unit, for every stage or one for each."""

    whole: float | Sequence[float] = 1
    kept_for_weights: float = 1.0  # the share that only W frees; 1 is the careful assumption

    def __post_init__(self) -> None:
        if not 0 <= self.kept_for_weights <= 1:
            raise UsageError(f"kept_for_weights is a share between 0 and 1, not {self.kept_for_weights}")

    def of(self, stage: int) -> float:
        return self.whole[stage] if isinstance(self.whole, Sequence) else self.whole

    def check(self, stages: int) -> None:
        if isinstance(self.whole, Sequence) and len(self.whole) != stages:
            raise UsageError(f"{len(self.whole)} sizes are given for {stages} stages; give one for each stage")

    def made(self, action: Action) -> float:
        """What an action adds when it starts."""
        return self.of(action.stage) if action.kind == "F" else 0

    def freed(self, action: Action, evaluates: bool) -> float:
        """What an action frees when it ends; a forward keeps nothing where no backward comes."""
        share = {"F": int(evaluates), "B": 1, "I": 1 - self.kept_for_weights, "W": self.kept_for_weights}[action.kind]
        return share * self.of(action.stage)


def alive(schedule: Schedule, rank: int, sizes: Sizes | None = None) -> list[float]:
    """What a rank keeps while each of its actions runs."""
    sizes = sizes or Sizes()
    sizes.check(schedule.stages)
    levels = []
    level: float = 0
    for action in schedule.actions[rank]:
        level += sizes.made(action)
        levels.append(level)
        level -= sizes.freed(action, evaluates=not schedule.backward)
    return levels


def peak(schedule: Schedule, rank: int, sizes: Sizes | None = None) -> float:
    """The most that a rank keeps at any time."""
    return max(alive(schedule, rank, sizes))


def microbatches_alive(schedule: Schedule, stage: int) -> int:
    """The most microbatches that a stage keeps anything of at any time."""
    level = most = 0
    last = schedule.backward[-1] if schedule.backward else "F"
    for action in schedule.actions[schedule.placement[stage]]:
        if action.stage == stage:
            level += action.kind == "F"
            most = max(most, level)
            level -= action.kind == last
    return most


def alive_over_time(timeline: Timeline, rank: int, sizes: Sizes | None = None) -> list[tuple[float, float]]:
    """The steps (time, what the rank keeps from then on), from (0, 0) to the end, where nothing is left."""
    sizes = sizes or Sizes()
    sizes.check(timeline.schedule.stages)
    steps: list[tuple[float, float]] = [(0, 0)]

    def step(time: float, change: float) -> None:
        level = steps[-1][1] + change
        if steps[-1][0] == time:
            steps.pop()
        if not steps or steps[-1][1] != level:
            steps.append((time, level))

    for span in timeline.spans[rank]:
        step(span.start, sizes.made(span.action))
        step(span.end, -sizes.freed(span.action, evaluates=not timeline.schedule.backward))
    return steps
