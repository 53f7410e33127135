"""recompute=auto:12GiB: the fastest recomputation with which a rank needs no more than that.

The memory and time of each setting are those of the cost model (plan/cost), from a trace of the job. Every rank chooses
by itself, before ranks communicate: the profile is the same on all of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from unisono.amounts import format_bytes
from unisono.errors import UsageError
from unisono.plan.hardware.toml import read_hardware
from unisono.plan.plan import RECOMPUTE, Plan
from unisono.plan.search.search import Candidate
from unisono.planner.choice import Job
from unisono.planner.planner import Planner


def resolve_recompute(plan: Plan, job: Job | None, device: torch.device) -> tuple[Plan, str]:
    """The plan with a recomputation instead of auto:..., and a sentence on it; other plans as they are. job: None where
    no example is known."""
    limit = plan.memory_limit
    if limit is None:
        return plan, ""
    if job is None:
        raise UsageError(
            f"recompute={plan.recompute} is chosen by the memory that a batch takes; pass example=(inputs, targets)"
        )
    found = _candidates(plan, job, device)
    fitting = [each for each in found if each.footprint.total <= limit]
    if not fitting:
        smallest = min(found, key=lambda each: each.footprint.total)
        raise UsageError(
            f"recompute={plan.recompute}: under plan {plan.but(recompute='none')} a rank needs at least "
            f"{format_bytes(smallest.footprint.total)} (recompute={smallest.plan.recompute}) of {format_bytes(limit)}; "
            "use a larger limit, more ranks or ZeRO"
        )
    best = min(fitting, key=lambda each: each.seconds)
    return best.plan, (
        f"recompute={best.plan.recompute} is the fastest that fits {format_bytes(limit)}: a rank needs "
        f"{format_bytes(best.footprint.total)}"
    )


def _candidates(plan: Plan, job: Job, device: torch.device) -> list[Candidate]:
    """What every kind of recomputation needs and takes under the plan."""
    # Of the machine only proportions matter here: what an op takes of another.
    is_gpu = device.type == "cuda"
    machine = replace(
        read_hardware("h100"), devices_per_node=plan.world, nodes=None, dropout_mask=0.0 if is_gpu else 4.0,
        asynchronous=is_gpu,
    )  # fmt: skip
    try:
        search = Planner(job.task(), machine).search(plan.world)
        kinds = [each for each in RECOMPUTE if each != "attention" or search.profile.has_scores]
        if not search.profile.blocks or not search.profile.recomputes:
            kinds = ["none"]
        return [search.judged(plan.but(recompute=each)) for each in kinds]
    except UsageError as error:
        raise UsageError(
            f"recompute={plan.recompute} needs the job's profile, which could not be made: {error}; name one of "
            f"{', '.join(RECOMPUTE)} instead"
        ) from error
