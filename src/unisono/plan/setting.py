"""What of a plan decides about one segment of the model on one rank."""

from __future__ import annotations

from typing import NamedTuple

from unisono.plan.plan import Plan
from unisono.plan.portrait import Portrait, Segment


class Setting(NamedTuple):
    """How a segment is divided: equal settings have equal memory and time."""

    rows: float  # samples of a microbatch on a rank
    tp: int
    cp: int
    ep: int
    sequence: bool
    recompute: str

    @classmethod
    def of(cls, plan: Plan, batch: int) -> Setting:
        recompute = plan.recompute if isinstance(plan.recompute, str) else "none"
        return cls(batch / plan.dp / plan.microbatches, plan.tp, plan.cp, plan.ep, plan.sequence, recompute)

    def outside(self, segment: Segment) -> float:
        """What divides a sample's activations outside tensor-parallel regions."""
        if not segment.in_blocks:
            return self.cp
        return self.cp * (self.tp if self.sequence else 1)


def hidden_bytes(portrait: Portrait, setting: Setting) -> float:
    """Of a microbatch's activations between two blocks, on one rank."""
    return portrait.hidden * setting.rows / setting.cp / (setting.tp if setting.sequence else 1)
