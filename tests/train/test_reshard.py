"""Any plan to any plan: what was saved under each is loaded under itself and the plans after it, bit for bit, and
training goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.train import stores
from unisono.plan.plan import Plan

PLANS = {
    "slim": [
        "dp=1",
        "dp=2,zero=1",
        "dp=2,zero=3",
        "dp=4,zero=3,shard=2",
        "dp=2,tp=2,sp,zero=2",
        "cp=2,zero=1",
        "pp=2,microbatches=4,schedule=zbv,chunks=2",
    ],
    "slim on more ranks": [
        "dp=1",
        "dp=4,zero=3",
        "dp=4,zero=3,shard=2",
        "dp=2,tp=2,sp,zero=2",
        "tp=2,pp=2,microbatches=4",
        "dp=2,cp=2,zero=1",
        "pp=2,microbatches=4,schedule=zbv,chunks=2",
    ],
    "moe": ["dp=1", "dp=2,ep=2,zero=1", "dp=4,ep=4"],
    "conv": ["dp=1", "dp=4,zero=3"],
}
REACH = {"slim": 1, "slim on more ranks": 3, "moe": 2, "conv": 1}  # plans before a plan that have saved what it loads


@pytest.mark.parametrize(
    "case",
    ["moe", "conv", *(pytest.param(case, marks=pytest.mark.thorough) for case in ("slim", "slim on more ranks"))],
)
def test_from_plan_to_plan(pools: Callable[[str, int], RankPool], tmp_path: Path, case: str) -> None:
    plans, task = PLANS[case], case.partition(" ")[0]
    for number, plan in enumerate(plans):
        sizes = pools("gloo", Plan.parse(plan).world).run(stores.save, str(tmp_path), task, plan, number % 2 == 0)
        if plan in ("dp=2,zero=3", "dp=4,zero=3"):  # no rank has much more than its share to write
            assert max(sizes) < 1.2 * sum(sizes) / len(sizes) + 8192
    for number, plan in enumerate(plans):
        pool = pools("gloo", Plan.parse(plan).world)
        others = [plans[(number + turn) % len(plans)] for turn in range(-REACH[case], 0)]
        faults = pool.run(stores.load, str(tmp_path), task, [*others, plan], plan, [plan, others[-1]])
        assert not any(faults), faults
