"""What the activations of one sample take under tensor parallelism, sp and recomputation: `unisono plan --activations`.

For one layer (block) and for all, as Megatron counts it (a column-parallel layer gathers its input again in the
backward) and as unisono keeps it; the collectives of a layer between the tp ranks; and what of the forward is computed
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unisono.amounts import GIB, MIB, format_bytes
from unisono.errors import UsageError
from unisono.plan.cost.memory import saved_by
from unisono.plan.plan import Plan
from unisono.plan.profile.model_profile import Setting

if TYPE_CHECKING:
    from unisono.plan.profile.model_profile import ModelProfile, Segment
    from unisono.planner.planner import Planner


@dataclass(frozen=True)
class ActivationRow:
    plan: str
    layer: float  # bytes of the first block
    all_layers: float
    kept: float  # bytes of the first block, in unisono
    collectives: str  # of a layer, forward; the backward has as many
    again: float  # share of a layer's forward that is computed again

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "layer_mib": self.layer / MIB,
            "all_layers_gib": self.all_layers / GIB,
            "kept_mib": self.kept / MIB,
            "collectives": self.collectives,
            "computed_again": self.again,
        }


def activation_rows(planner: Planner, ranks: int) -> list[ActivationRow]:
    """One sample on one device, with tp over `ranks`, with sp, and with recomputation of attention or of everything."""
    profile = planner.profile
    if not profile.blocks:
        raise UsageError(f"--activations: {profile.name} has no repeated blocks, whose layers could be distinguished")
    plans = [Plan()]
    if ranks > 1:
        refusal = planner.allows(Plan(tp=ranks))
        if refusal:
            raise UsageError(f"--activations with --devices {ranks}: {refusal}")
        shared = Plan(tp=ranks, sequence=True)
        plans += [Plan(tp=ranks), shared, shared.but(recompute="attention")]
    plans.append(Plan(recompute="full"))
    return [_row(profile, plan) for plan in plans]


def _row(profile: ModelProfile, plan: Plan) -> ActivationRow:
    setting = Setting.of(plan, 1)
    gathering = replace(profile, keeps_gathered=False)
    first = profile.blocks[0]
    return ActivationRow(
        str(plan) if plan != Plan() else "one device",
        saved_by(gathering, first, setting),
        sum(saved_by(gathering, block, setting) for block in profile.blocks),
        saved_by(replace(profile, keeps_gathered=True), first, setting),
        _collectives(first, setting),
        _again(first, setting),
    )


def _collectives(segment: Segment, setting: Setting) -> str:
    if setting.tp == 1:
        return "-"
    if setting.sequence:
        return f"{len(segment.enters)} all_gather, {len(segment.leaves)} reduce_scatter"
    return f"{len(segment.leaves)} all_reduce"


def _again(segment: Segment, setting: Setting) -> float:
    total = sum(work.flops for work in segment.ops)
    if setting.recompute == "none" or not total:
        return 0.0
    return sum(work.flops for work in segment.ops if setting.recompute == "full" or work.is_core) / total


def show(profile: ModelProfile, rows: list[ActivationRow]) -> str:
    titles = ("plan", "a layer", f"{len(profile.blocks)} layers", "kept by unisono", "collectives of a layer", "again")
    cells = [
        (
            row.plan,
            format_bytes(row.layer, "MiB", 0),
            format_bytes(row.all_layers, "GiB", 2),
            format_bytes(row.kept, "MiB", 0),
            row.collectives,
            f"{row.again:.1%}" if row.again else "-",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (titles, *cells)]
    head = f"{profile.name}: activations of one sample in {profile.dtype}, on one device"
    return "\n".join([head, *(line.rstrip() for line in lines), "again: of a layer's forward, what is computed again"])
