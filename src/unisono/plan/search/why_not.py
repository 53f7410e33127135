"""Why not: the neighbours of a plan, and what each of them lacks."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.amounts import format_bytes
from unisono.plan.cost.collective import group
from unisono.plan.plan import REPLICAS, Plan
from unisono.plan.search.neighbours import neighbours
from unisono.plan.search.search import TIE, Candidate, Search


@dataclass(frozen=True)
class Rejection:
    """A neighbour and the reason against it: `tp=16: +38% (tp crosses nodes)`."""

    change: str
    plan: Plan
    reason: str
    seconds: float | None = None
    memory: float | None = None

    def __str__(self) -> str:
        return f"{self.change}: {self.reason}"


def why_not(search: Search, best: Candidate) -> list[Rejection]:
    """Each neighbour of the best plan with the reason for which it lost; those that cannot run first, then the
    cheaper that do not fit, then the slower."""
    changes = neighbours(best.plan, search.world, search.profile)
    judged = [_rejection(search, best, change, plans) for change, plans in changes]
    return sorted(judged, key=lambda each: (each.seconds is not None, each.seconds or 0.0))


def _rejection(search: Search, best: Candidate, change: str, plans: list[Plan]) -> Rejection:
    """Of the best that the change can mean."""
    allowed = search.allowed(plans)
    if not allowed:
        return Rejection(change, plans[0], f"cannot: {search.refusal(plans[0])}")
    other = search.settled(*allowed)
    named = _named(change, best.plan, other.plan)
    if not other.fits:
        reason = search.hardware.short_of(other.footprint.total)
        return Rejection(named, other.plan, reason, memory=other.footprint.total)
    reason = _difference(search, best, other, other.seconds / best.seconds - 1)
    return Rejection(named, other.plan, reason, other.seconds, other.footprint.total)


def _named(change: str, base: Plan, plan: Plan) -> str:
    """The change, with what else had to change beside dp."""
    names = {name: getattr(plan, name) for name in ("microbatches", "schedule", "chunks")}
    also = [f"{name}={value}" for name, value in names.items() if value != getattr(base, name) and name not in change]
    is_of_pipeline = "schedule" in change or (plan.pp == 1 and base.pp > 1)  # chunks, or none, follow from that
    also = [word for word in also if not is_of_pipeline or word.startswith("microbatches")]
    return f"{change} with {','.join(also)}" if also else change


def _difference(search: Search, best: Candidate, other: Candidate, slower: float) -> str:
    if abs(slower) < TIE:
        more = other.footprint.total - best.footprint.total
        if abs(more) < TIE * best.footprint.total:
            return "as fast, with as much memory"
        return f"as fast, {format_bytes(abs(more))} {'more' if more > 0 else 'less'}"
    if slower < 0 and other.plan.zero > best.plan.zero:
        return f"as fast within the error of predictions ({slower:+.0%}); ZeRO {other.plan.zero} is for less memory"
    return f"{slower:+.0%} ({_gain(best, other) if slower < 0 else _cause(search, best, other)})"


def _grown(best: Candidate, other: Candidate) -> dict[str, float]:
    """Seconds that each part of the step takes more."""
    parts = ("compute", "tensor", "bubble", "gradients", "optimizer")
    return {part: getattr(other.duration, part) - getattr(best.duration, part) for part in parts}


def _gain(best: Candidate, other: Candidate) -> str:
    """What shrank most."""
    grown = _grown(best, other)
    words = {
        "tensor": "fewer messages between tp and cp ranks",
        "bubble": "smaller bubble",
        "gradients": "gradients travel less, or hide better",
        "optimizer": "optimizer updates less on each rank",
        "compute": "larger products" if other.plan.recompute == best.plan.recompute else "computes less again",
    }
    return words[min(grown, key=lambda name: grown[name])]


def _cause(search: Search, best: Candidate, other: Candidate) -> str:
    """What grew most."""
    grown = _grown(best, other)
    part = max(grown, key=lambda name: grown[name])
    plan, base = other.plan, best.plan
    crosses = group(search.hardware, plan, "tp").crosses
    words = {
        "tensor": "tp crosses nodes" if crosses and plan.tp > 1 else "more messages between tp and cp ranks",
        "bubble": "larger bubble",
        "gradients": "gradients cross nodes" if group(search.hardware, plan, *REPLICAS).crosses else "gradients travel",
        "optimizer": "optimizer updates more on each rank",
        "compute": "smaller products" if plan.recompute == base.recompute else "computes activations again",
    }
    if part == "compute" and base.zero and not plan.zero:
        return "casts weights in every microbatch"
    if part == "compute" and plan.tp < base.tp and not plan.sequence:
        return "norms and residuals on every rank"
    return words[part]
