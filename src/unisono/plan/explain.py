"""Why not: the neighbours of a plan, and what each of them lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.plan.collective import group
from unisono.plan.plan import REPLICAS, Plan
from unisono.plan.search import Candidate, Search

_TIE = 0.005


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
    judged = [_rejection(search, best, change, plan) for change, plan in _neighbours(search, best.plan)]
    return sorted(judged, key=lambda each: (each.seconds is not None, each.seconds or 0.0))


def _rejection(search: Search, best: Candidate, change: str, plan: Plan) -> Rejection:
    refusal = search.refusal(plan)
    if refusal is not None:
        return Rejection(change, plan, f"cannot: {refusal}")
    other = search.judged(plan, played=True)
    if not other.fits:
        needs, has = other.footprint.total / 2**30, search.hardware.usable_memory / 2**30
        return Rejection(change, plan, f"needs {needs:.0f} GiB of {has:.0f}", memory=other.footprint.total)
    slower = other.seconds / best.seconds - 1
    return Rejection(change, plan, _told(search, best, other, slower), other.seconds, other.footprint.total)


def _told(search: Search, best: Candidate, other: Candidate, slower: float) -> str:
    if abs(slower) < _TIE:
        more = other.footprint.total - best.footprint.total
        return f"as fast, {abs(more) / 2**30:.1f} GiB {'more' if more > 0 else 'less'}"
    return f"{slower:+.0%} ({_cause(search, best, other)})"


def _cause(search: Search, best: Candidate, other: Candidate) -> str:
    """What grew most."""
    parts = ("compute", "tensor", "bubble", "gradients", "optimizer")
    grown = {part: getattr(other.duration, part) - getattr(best.duration, part) for part in parts}
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
    if part == "compute" and plan.tp < base.tp and not plan.sequence:
        return "norms and residuals on every rank"
    return words[part]


def _neighbours(search: Search, plan: Plan) -> Iterator[tuple[str, Plan]]:
    seen = {plan}
    for change, changes in _changes(plan):
        try:
            made = _fitted(search, plan.but(boundaries=(), **changes))
        except UsageError:
            continue
        if made is not None and made not in seen:
            seen.add(made)
            yield change, made


def _changes(plan: Plan) -> Iterator[tuple[str, dict[str, object]]]:
    for axis in ("tp", "pp", "cp"):
        size = getattr(plan, axis)
        for other in (size * 2, size // 2):
            if other >= 1:
                changes: dict[str, object] = {axis: other}
                if axis == "tp" and other == 1:
                    changes["sequence"] = False
                if axis == "pp" and other == 1:
                    changes |= {"schedule": "1f1b", "chunks": 1}
                yield f"{axis}={other}", changes
    for zero in (0, 1, 2, 3):
        yield f"zero={zero}", {"zero": zero}
    for recompute in ("none", "selective", "full"):
        yield f"recompute={recompute}", {"recompute": recompute}
    if plan.tp > 1:
        yield ("without sp" if plan.sequence else "sp"), {"sequence": not plan.sequence}
    for m in (plan.microbatches * 2, plan.microbatches // 2):
        if m >= 1:
            yield f"microbatches={m}", {"microbatches": m}
    if plan.pp > 1:
        for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb1p", 1), ("zbv", 2)):
            words = f"schedule={schedule}" + (f",chunks={chunks}" if schedule == "interleaved" else "")
            yield words, {"schedule": schedule, "chunks": chunks}


def _fitted(search: Search, plan: Plan) -> Plan | None:
    """With dp so that it needs all devices, and as many microbatches of the same size where it can."""
    others = plan.tp * plan.pp * plan.cp
    if search.world % others:
        return None
    dp = search.world // others
    if plan.zero and dp * plan.cp == 1:
        return None
    ep = plan.ep if dp % plan.ep == 0 else 1
    made = plan.but(dp=dp, ep=ep)
    while made.microbatches > 1 and dp * made.microbatches > search.portrait.batch:
        made = made.but(microbatches=made.microbatches // 2)
    return made
