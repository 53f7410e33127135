"""Losses that models compute themselves are normalised over the global batch, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.equivalence.proof import prove, refused
from tests.ranks import RankPool
from unisono.plan.plan import Plan

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
for _name in ("Llama", "Mixtral", "Bert", "T5"):  # here, so that ranks that are forked later need not
    getattr(transformers, f"{_name}Model")

Pools = Callable[[str, int], RankPool]

PLANS = {
    "llama": ["dp=2,microbatches=2", "dp=2,zero=3", "tp=2,microbatches=2", "pp=2,microbatches=3", "dp=2,tp=2"],
    "lengths": ["dp=2,microbatches=2", "cp=2"],
    "llama_with_targets": [
        "dp=2",
        "tp=2,sp,microbatches=4",
        "cp=2",
        "cp=2,context=ulysses,microbatches=2",
        "dp=2,cp=2",
    ],
    "gpt2": ["tp=2,microbatches=2", "dp=2,tp=2"],
    "bert": ["dp=2", "cp=2"],
    "classifier": ["dp=2,microbatches=2", "cp=2"],
    "regression": ["dp=2,microbatches=3"],
    "answers": ["dp=2"],
    "t5": ["dp=2", "tp=2,microbatches=2"],
    "mixtral": ["dp=2"],
    "router": ["tp=2"],
    "nano": ["dp=2,microbatches=2", "pp=2,microbatches=3"],
}
REFUSED = {
    ("router", "dp=2"): "made of all samples of a batch before the labels are looked at, such as a router's auxiliary",
    ("divided_by_hand", "dp=2"): "uses the number of samples that it is given",
    ("counting", "dp=2"): "or a count: it would be that of a part of the batch",
    ("reading", "dp=2"): "reads values of its labels in Python (item)",
    ("without_labels", "dp=2"): "its values depend on the samples",
}


@pytest.mark.parametrize(("task", "plan"), [(task, plan) for task, plans in PLANS.items() for plan in plans])
def test_a_plan_changes_nothing(pools: Pools, task: str, plan: str) -> None:
    verdict = pools("gloo", Plan.parse(plan).world).run(prove, "own_loss", task, plan)[0]
    assert verdict.equivalent, verdict


@pytest.mark.parametrize(("task", "plan"), REFUSED)
def test_what_cannot_be_right_is_refused(pools: Pools, task: str, plan: str) -> None:
    for reported in pools("gloo", 2).run(refused, "own_loss", task, plan):
        assert REFUSED[task, plan] in reported
