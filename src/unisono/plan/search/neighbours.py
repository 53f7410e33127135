"""The neighbours of a plan: those that differ in one decision, and in what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono.errors import UsageError
from unisono.plan.plan import RECOMPUTE, Plan
from unisono.plan.profile.model_profile import ModelProfile
from unisono.plan.search.partition import chunks_of

_SHARED = ("tp", "pp", "cp")  # axes of which each leaves dp the rest of the devices


def neighbours(plan: Plan, world: int, profile: ModelProfile) -> Iterator[tuple[str, list[Plan]]]:
    """What is changed, and the plans that it may mean: with as many microbatches, and with ones of the same size."""
    seen = {plan.but(boundaries=())}
    for change, changes in _changes(plan, profile):
        made = []
        for each in _completed(plan, changes, world, profile):
            if each not in seen:
                seen.add(each)
                made.append(each)
        if made:
            yield change, made


def _changes(plan: Plan, profile: ModelProfile) -> Iterator[tuple[str, dict[str, Any]]]:
    for axis in _SHARED:
        for other in _sizes_beside(plan, axis):
            yield f"{axis}={other}", {axis: other}
    if profile.has_experts:
        for ep in (plan.ep * 2, plan.ep // 2):
            if ep >= 1 and plan.dp % ep == 0 and profile.expert_count % ep == 0:
                yield f"ep={ep}", {"ep": ep}
    for zero in (0, 1, 2, 3):
        yield f"zero={zero}", {"zero": zero}
    for recompute in RECOMPUTE:
        if recompute == "attention" and not profile.has_scores:
            continue
        yield f"recompute={recompute}", {"recompute": recompute}
    if plan.tp > 1:
        yield ("without sp" if plan.sequence else "sp"), {"sequence": not plan.sequence}
    if plan.cp > 1:
        kind = "ring" if plan.context == "ulysses" else "ulysses"
        yield f"context={kind}", {"context": kind}
    for m in (plan.microbatches * 2, plan.microbatches // 2):
        if m >= 1:
            yield f"microbatches={m}", {"microbatches": m}
    if plan.pp > 1:
        for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb1p", 1), ("zbv", 2)):
            words = f"schedule={schedule}" + (f",chunks={chunks}" if schedule == "interleaved" else "")
            yield words, {"schedule": schedule, "chunks": chunks}


def _sizes_beside(plan: Plan, axis: str) -> list[int]:
    """The next larger and the next smaller size that the devices can be divided into."""
    size, room = getattr(plan, axis), getattr(plan, axis) * plan.dp
    fitting = [each for each in range(1, room + 1) if room % each == 0]
    larger, smaller = (each for each in fitting if each > size), (each for each in reversed(fitting) if each < size)
    return [each for each in (next(larger, None), next(smaller, None)) if each is not None]


def _completed(plan: Plan, changes: dict[str, Any], world: int, profile: ModelProfile) -> Iterator[Plan]:
    """With dp so that all devices are needed, and without what no longer makes sense."""
    given = {name: changes.get(name, getattr(plan, name)) for name in _SHARED}
    dp = world // (given["tp"] * given["pp"] * given["cp"])
    made = {"boundaries": (), "dp": dp, "ep": plan.ep if dp % plan.ep == 0 else 1, "shard": 0} | changes
    if given["tp"] == 1:
        made["sequence"] = False
    if given["cp"] == 1:
        made["context"] = "ring"
    if "pp" in changes:
        made |= _schedule(plan, given["pp"], len(profile.blocks))
    if dp * given["cp"] == 1:
        if "zero" in changes:
            return
        made |= {"zero": 0, "offload": False}
    counts = [plan.microbatches, max(plan.microbatches * plan.dp // dp, 1)] if dp != plan.dp else [plan.microbatches]
    for m in counts:
        m = min(m, max(profile.batch // dp, 1))
        try:
            yield plan.but(**({"microbatches": m} | made))
        except UsageError:
            continue


def _schedule(plan: Plan, pp: int, blocks: int) -> dict[str, Any]:
    """The plan's own, with as many chunks as there are blocks for."""
    if pp == 1:
        return {"schedule": "1f1b", "chunks": 1}
    chunks = min(chunks_of(plan), max(blocks // pp, 1))
    if plan.schedule == "zbv" and chunks < 2:
        return {"schedule": "zb1p", "chunks": 1}
    if plan.schedule == "interleaved" and chunks < 2:
        return {"schedule": "1f1b", "chunks": 1}
    return {"chunks": chunks}
