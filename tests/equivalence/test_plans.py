"""Every strategy alone, every pair, and hybrids, on several models: the result of one device, in float64, to 1e-9."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import combinations

import pytest

from tests.equivalence.proof import prove
from tests.ranks import RankPool
from unisono.plan.plan import Plan

PLANS = {
    "mlp": [
        "dp=4",
        "dp=2,zero=1,microbatches=3,offload",
        "dp=2,zero=2",
        "dp=4,zero=3,microbatches=2,offload",
        "dp=4,zero=1,shard=2",
        "dp=4,zero=2,shard=2,microbatches=2",
        "dp=4,zero=3,shard=2",
        "dp=2,microbatches=3",
        "tp=4",
        "dp=2,tp=2",
        "dp=2,tp=2,zero=3",
        "pp=2,microbatches=4",
        "pp=4,microbatches=4,schedule=f-then-b",
        "pp=2,dp=2,microbatches=2",
        "pp=2,tp=2,microbatches=4,schedule=zb1p",
        "dp=2,pp=2,microbatches=3,zero=2,offload",
    ],
    "conv": ["dp=4", "dp=2,zero=1", "dp=2,zero=2", "dp=4,zero=3", "pp=2"],
    "gpt": [
        "pp=4,microbatches=4",
        "pp=2,microbatches=4,schedule=interleaved,chunks=2",
        "pp=2,microbatches=4,schedule=zbv,chunks=2",
        "dp=2,pp=2,microbatches=4,zero=3,schedule=interleaved,chunks=2",
        "dp=2,pp=2,microbatches=4,zero=2,schedule=zbv,chunks=2",
    ],
    "short": [
        "dp=4,zero=1",
        "dp=4,zero=3,shard=2,microbatches=2",
        "dp=2,zero=2,microbatches=2",
        "dp=2,zero=3,recompute=full",
        "tp=2,sp",
        "cp=2",
        "cp=4,zero=1",
        "cp=2,context=ulysses",
        "pp=2,microbatches=4",
        "pp=2,microbatches=1,schedule=naive",
        "recompute=selective",
        "recompute=attention,microbatches=2",
        "recompute=full,microbatches=3",
        "dp=2,zero=3,microbatches=2,recompute=selective",
        "cp=2,recompute=selective",
        "pp=2,microbatches=3,schedule=zb1p,recompute=selective",
        "pp=2,tp=2,sp,microbatches=2,schedule=zb1p,recompute=selective",
        "dp=2,tp=2,sp,zero=1",
        "dp=2,cp=2,context=ulysses,zero=2,microbatches=2",
        "dp=2,cp=2,zero=3,microbatches=2",
        "dp=2,pp=2,microbatches=2,zero=1",
        "dp=4,pp=2,microbatches=2,zero=2,shard=2",
        "dp=4,tp=2,zero=3,shard=2",
        "tp=2,cp=2,sp,context=ulysses,recompute=selective",
        "cp=2,pp=2,microbatches=2,context=ulysses,zero=3,offload,recompute=*.attention",
        "cp=2,pp=2,microbatches=2,zero=3,recompute=full",
        "tp=2,cp=2,sp,zero=2,offload,recompute=attention",
        # On eight ranks; dp=2,tp=2,pp=2,zero=1,sp is examples/seeds/004_overview/hybrid.py, which proves it itself.
        "tp=2,cp=2,pp=2,microbatches=2,context=ulysses,zero=1,recompute=full",
        "dp=2,tp=2,pp=2,microbatches=2,zero=3,sp",
    ],
}
PLANS["moe"] = [
    "dp=2,ep=2",
    "dp=4,ep=2,zero=3,microbatches=2,recompute=full",
    "dp=4,ep=4,zero=1",
    "dp=2,ep=2,cp=2",
    "dp=2,ep=2,cp=2,context=ulysses",
    "tp=2,sp",
    "dp=2,ep=2,recompute=selective",
    "dp=2,ep=2,tp=2,sp,zero=2,offload",
    "dp=2,ep=2,pp=2,microbatches=2",
]
PLANS["circuit"] = ["dp=2,microbatches=3"]
PLANS["tuned"] = ["dp=2,zero=3", "tp=2"]
PLANS["vocabulary"] = ["tp=2", "dp=2,tp=2,sp,microbatches=2", "tp=2,pp=2,microbatches=2", "tp=2,cp=2"]
PLANS["vocabulary_reshaped"] = ["tp=4", "dp=2,tp=2,microbatches=2"]
PLANS["vocabulary_full"] = ["dp=2,tp=2"]
if importlib.util.find_spec("transformers"):
    PLANS["llama"] = [
        "tp=2,recompute=selective",
        "dp=2,zero=3",
        "tp=2",
        "cp=2",
        "pp=2,microbatches=4",
        "dp=2,tp=2,zero=1",
    ]


def world_of(plan: str) -> int:
    return Plan.parse(plan).world


ZEROS = ((1, 2), (1, 3), (2, 3))
# Few ranks first: those of a pool that is not at work still wake up, the more the more groups they have made.
CASES = sorted(((task, plan) for task, plans in PLANS.items() for plan in plans), key=lambda case: world_of(case[1]))


def check(pool: RankPool, task: str, plan: str) -> None:
    verdict = pool.run(prove, "tasks", task, plan)[0]
    assert verdict.equivalent, verdict


@pytest.mark.parametrize(("task", "plan"), CASES)
def test_a_plan_changes_nothing(pools: Callable[[str, int], RankPool], task: str, plan: str) -> None:
    check(pools("gloo", world_of(plan)), task, plan)


def strategies(plan: Plan) -> set[str]:
    named = {
        "dp": plan.dp > 1,
        "ep": plan.ep > 1,
        "tp": plan.tp > 1,
        "sp": plan.sequence,
        "pp": plan.pp > 1,
        "ring": plan.cp > 1 and plan.context == "ring",
        "ulysses": plan.cp > 1 and plan.context == "ulysses",
        "recompute": plan.recompute != "none",
        "accumulation": plan.microbatches > 1 and plan.pp == 1,
        "offload": plan.offload,
        f"zero {plan.zero}": plan.zero > 0,
    }
    return {name for name, is_used in named.items() if is_used}


def test_every_pair_of_strategies_is_among_the_plans() -> None:
    used = [strategies(Plan.parse(plan)) for _, plan in CASES]
    exclusive = [{"ring", "ulysses"}, {"accumulation", "pp"}, *({f"zero {a}", f"zero {b}"} for a, b in ZEROS)]
    pairs = [set(pair) for pair in combinations(sorted(set().union(*used)), 2)]
    missing = [pair for pair in pairs if pair not in exclusive and not any(pair <= each for each in used)]
    assert not missing
    assert len({plan for _, plan in CASES}) >= 40
    assert max(world_of(plan) for _, plan in CASES) == 8


@pytest.mark.parametrize(
    ("task", "plan"),
    [("short", "dp=2,tp=2,sp,zero=1"), ("short", "cp=2,pp=2,microbatches=2"), ("conv", "dp=4,zero=3"), ("mlp", "dp=4")],
)
def test_on_mpi_too(pools: Callable[[str, int], RankPool], task: str, plan: str) -> None:
    check(pools("mpi", 4), task, plan)
