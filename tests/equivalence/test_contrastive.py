"""Losses across the full batch give what one device gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.equivalence.proof import prove, refused
from tests.ranks import RankPool
from unisono.plan.plan import Plan

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
for _name in ("CLIP", "Siglip"):  # here, so that ranks that are forked later need not
    getattr(transformers, f"{_name}Model")

Pools = Callable[[str, int], RankPool]

PLANS = {
    "towers": ["dp=2", "dp=2,zero=3", "tp=2", "dp=2,tp=2", "dp=4"],
    "classes": ["dp=2", "dp=2,zero=1"],
    "compared": ["dp=2"],
    "clip": ["dp=2", "dp=2,zero=3", "tp=2"],
    "siglip": ["dp=2"],
}
REFUSED = {
    ("plain", "dp=2"): "is given all of them by loss=uni.BatchLoss(loss)",
    ("towers", "dp=2,microbatches=2"): "uni.BatchLoss with microbatches=2: the loss needs all samples",
    ("otherwise", "dp=2"): "return the embeddings and compare them in the loss",
}


@pytest.mark.parametrize(("task", "plan"), [(task, plan) for task, plans in PLANS.items() for plan in plans])
def test_a_plan_changes_nothing(pools: Pools, task: str, plan: str) -> None:
    verdict = pools("gloo", Plan.parse(plan).world).run(prove, "contrastive", task, plan)[0]
    assert verdict.equivalent, verdict


@pytest.mark.parametrize(("task", "plan"), REFUSED)
def test_what_cannot_be_right_is_refused(pools: Pools, task: str, plan: str) -> None:
    for reported in pools("gloo", Plan.parse(plan).world).run(refused, "contrastive", task, plan):
        assert REFUSED[task, plan] in reported
