"""A schedule as one rank runs it: operations on local axes, and blocks traded with partners. Static, so made once.

Walked forwards it runs the circuit; walked backwards, with each operation undone, it goes back: a trade is its own
inverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.errors import UsageError
from unisono.quantum.arguments import shown
from unisono.quantum.distributed.global_index_map import Holdings
from unisono.quantum.distributed.local_steps import LocalStep, Run, local_steps
from unisono.quantum.schedule.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """`holdings` is the table of held indices after the last step."""

    schedule: Schedule
    rank: int
    steps: tuple[LocalStep, ...]
    holdings: Holdings

    @classmethod
    def of(cls, schedule: Schedule, rank: int = 0, holdings: Holdings | None = None) -> Program:
        if not isinstance(schedule, Schedule):
            raise UsageError(f"a program of {shown(schedule)}: expected a Schedule, such as Schedule.of(circuit)")
        table = Holdings(schedule.held) if holdings is None else holdings.copy()
        steps = tuple(local_steps(schedule.steps, rank, table))
        return cls(schedule, rank, steps, table)

    def prepare(self, axes: int, dtype: torch.dtype, device: torch.device, kernel: str) -> None:
        """Make its runs ready for a kernel, which takes memory of its own: best before a state does."""
        for step in self.steps:
            if isinstance(step, Run):
                step.runner(axes, dtype, device, kernel)
