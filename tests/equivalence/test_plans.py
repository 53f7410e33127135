"""Every strategy alone, every pair, and hybrids, on several models: the result of one device, in float64, to 1e-9."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from tests.equivalence.proof import prove
from tests.ranks import RankPool
from unisono.plan.plan import Plan

PLANS = {
    "mlp": [
        "dp=2",
        "dp=4",
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=4,zero=3",
        "dp=2,microbatches=3",
        "tp=2",
        "tp=4",
        "dp=2,tp=2",
        "dp=2,tp=2,zero=1",
        "dp=2,tp=2,zero=3",
        "pp=2,microbatches=4",
        "pp=4,microbatches=4,schedule=f-then-b",
        "pp=2,dp=2,microbatches=2",
        "pp=2,tp=2,microbatches=4,schedule=zb1p",
        "dp=2,pp=2,microbatches=3,zero=2",
    ],
    "conv": ["dp=2", "dp=4", "dp=2,zero=1", "dp=2,zero=2", "dp=4,zero=3", "pp=2"],
    "gpt": [
        "dp=2",
        "dp=4,zero=1",
        "dp=2,zero=2,microbatches=2",
        "dp=2,zero=3,recompute=full",
        "tp=2",
        "tp=4",
        "tp=2,sp",
        "cp=2",
        "cp=4",
        "cp=2,context=ulysses",
        "pp=2,microbatches=4",
        "pp=4,microbatches=4",
        "pp=2,microbatches=4,schedule=interleaved,chunks=2",
        "pp=2,microbatches=4,schedule=zbv,chunks=2",
        "pp=2,microbatches=1,schedule=naive",
        "recompute=selective",
        "recompute=full,microbatches=3",
        "dp=2,tp=2",
        "dp=2,tp=2,sp,zero=1",
        "dp=2,cp=2",
        "dp=2,cp=2,zero=3",
        "dp=2,pp=2,microbatches=2,zero=1",
        "tp=2,cp=2",
        "tp=2,pp=2,microbatches=4",
        "cp=2,pp=2,microbatches=2",
        "dp=2,tp=2,pp=2,microbatches=2,zero=1,sp",
        "dp=2,tp=2,cp=2",
        "tp=2,cp=2,pp=2,microbatches=2",
        "dp=2,pp=2,microbatches=2,zero=3",
        "dp=2,pp=2,microbatches=4,zero=2,schedule=interleaved,chunks=2",
        "dp=2,pp=2,microbatches=4,zero=3,schedule=interleaved,chunks=2",
        "dp=2,pp=2,microbatches=4,zero=2,schedule=zbv,chunks=2",
        "cp=2,pp=2,microbatches=2,zero=3,recompute=full",
        "dp=2,tp=2,pp=2,microbatches=2,zero=3",
    ],
}
PLANS["moe"] = [
    "dp=2",
    "dp=2,ep=2",
    "dp=4,ep=2",
    "dp=4,ep=4,zero=1",
    "dp=2,ep=2,cp=2",
    "tp=2,sp",
    "dp=2,ep=2,tp=2,sp",
    "dp=2,ep=2,pp=2,microbatches=2",
]
PLANS["tuned"] = ["dp=2,zero=3", "tp=2"]
PLANS["vocabulary"] = ["tp=2", "dp=2,tp=2,sp", "tp=2,pp=2,microbatches=2", "tp=2,cp=2"]
PLANS["vocabulary_reshaped"] = ["tp=4", "dp=2,tp=2,microbatches=2"]
PLANS["vocabulary_whole"] = ["dp=2,tp=2"]
if importlib.util.find_spec("transformers"):
    PLANS["llama"] = ["dp=2", "dp=2,zero=3", "tp=2", "tp=2,sp", "cp=2", "pp=2,microbatches=4", "dp=2,tp=2,zero=1"]
CASES = [(task, plan) for task, plans in PLANS.items() for plan in plans]


def check(pool: RankPool, task: str, plan: str) -> None:
    verdict = pool.run(prove, "tasks", task, plan)[0]
    assert verdict.equivalent, verdict


@pytest.mark.parametrize(("task", "plan"), CASES)
def test_a_plan_changes_nothing(pools: Callable[[str, int], RankPool], task: str, plan: str) -> None:
    check(pools("gloo", Plan.parse(plan).world), task, plan)


@pytest.mark.parametrize(
    ("task", "plan"),
    [("gpt", "dp=2,tp=2,sp,zero=1"), ("gpt", "cp=2,pp=2,microbatches=2"), ("conv", "dp=4,zero=3"), ("mlp", "dp=4")],
)
def test_on_mpi_too(pools: Callable[[str, int], RankPool], task: str, plan: str) -> None:
    check(pools("mpi", 4), task, plan)
