"""Every shape of plan for a number of ranks: what `--plan all` tries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from unisono.plan.plan import Plan


def plans_for(ranks: int, experts: bool = False) -> list[Plan]:
    """Every way to multiply the axes to `ranks`, each with what applies to it: ZeRO stages, sp, both kinds of cp, ep
    where the model has experts; and, where one axis takes all ranks, its schedules, microbatches and recomputation."""
    return list(dict.fromkeys(_shapes(ranks, experts)))


def _shapes(ranks: int, experts: bool) -> Iterator[Plan]:
    for dp, tp, pp in product(range(ranks, 0, -1), repeat=3):
        if ranks % (dp * tp * pp):
            continue
        plain = Plan(dp=dp, tp=tp, pp=pp, cp=ranks // (dp * tp * pp), microbatches=2 * pp if pp > 1 else 1)
        yield plain
        if tp > 1:
            yield plain.but(sequence=True)
        if plain.cp > 1:
            yield plain.but(context="ulysses")
        for stage in (1, 2, 3) if dp * plain.cp > 1 else ():
            yield plain.but(zero=stage)
        for part in range(2, dp + 1) if experts else ():
            if dp % part == 0:
                yield plain.but(ep=part)
    yield from _alone(ranks)


def _alone(ranks: int) -> Iterator[Plan]:
    yield Plan(dp=ranks, microbatches=2)
    yield Plan(dp=ranks, recompute="full")
    yield Plan(dp=ranks, recompute="selective")
    if ranks > 1:
        pipeline = Plan(pp=ranks, microbatches=2 * ranks)
        yield pipeline.but(microbatches=1, schedule="naive")
        yield pipeline.but(schedule="f-then-b")
        yield pipeline.but(schedule="zb1p")
        yield pipeline.but(schedule="interleaved", chunks=2)
        yield pipeline.but(schedule="zbv", chunks=2)
