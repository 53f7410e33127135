"""A schedule as one rank runs it: operations on local axes, and blocks exchanged with partners. Made once.

Walked forwards it runs the circuit; walked backwards, with each operation undone, it goes back: an exchange is its
own inverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.errors import UsageError
from unisono.quantum.arguments import shown
from unisono.quantum.distributed.global_index_map import GlobalIndexMap
from unisono.quantum.distributed.local_steps import LocalOperations, LocalStep, local_steps
from unisono.quantum.schedule.schedule import Schedule


@dataclass(frozen=True)
class QuantumProgram:
    """`index_map` is that after the last step."""

    schedule: Schedule
    rank: int
    steps: tuple[LocalStep, ...]
    index_map: GlobalIndexMap

    @classmethod
    def of(cls, schedule: Schedule, rank: int = 0, index_map: GlobalIndexMap | None = None) -> QuantumProgram:
        if not isinstance(schedule, Schedule):
            raise UsageError(f"a program of {shown(schedule)}: expected a Schedule, such as Schedule.of(circuit)")
        table = GlobalIndexMap(schedule.global_qubits) if index_map is None else index_map.copy()
        steps = tuple(local_steps(schedule.steps, rank, table))
        return cls(schedule, rank, steps, table)

    def prepare(self, axes: int, dtype: torch.dtype, device: torch.device, kernel: str) -> None:
        """Make its runs ready for a kernel, which takes memory of its own: best before a state does."""
        for step in self.steps:
            if isinstance(step, LocalOperations) and not step.has_strengths:
                step.runner(axes, dtype, device, kernel)
