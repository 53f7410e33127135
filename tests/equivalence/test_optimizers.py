"""Optimizers that look at more than an element, or evaluate the model several times, under plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.plan.plan import Plan
from unisono.verify.verify import Verdict, verify_here

Pools = Callable[[str, int], RankPool]


def optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.3, max_iter=3, line_search_fn="strong_wolfe")
    if name == "muon":
        return torch.optim.Muon([each for each in parameters if each.ndim == 2], lr=0.01)
    return torch.optim.Adafactor(parameters, lr=0.01)


def prove(comm: Communicator, name: str, task: str, plan: str) -> Verdict:
    with_it = replace(getattr(tasks, task), optimizer=lambda parameters: optimizer(name, parameters))
    return verify_here(comm, with_it, Plan.parse(plan), steps=2)


CASES = [
    ("lbfgs", "mlp", "dp=2"),
    ("lbfgs", "mlp", "dp=2,microbatches=3"),
    ("lbfgs", "short", "cp=2"),
    ("adafactor", "mlp", "dp=2,zero=1"),
    ("adafactor", "mlp", "dp=2,pp=2,microbatches=2,zero=3"),
    ("adafactor", "mlp", "pp=2,microbatches=4"),
    ("muon", "mlp", "dp=2,zero=2"),
]


@pytest.mark.parametrize(("name", "task", "plan"), CASES)
def test_a_plan_changes_nothing(pools: Pools, name: str, task: str, plan: str) -> None:
    verdict = pools("gloo", Plan.parse(plan).world).run(prove, name, task, plan)[0]
    assert verdict.equivalent, verdict


def refused(comm: Communicator, name: str, plan: str) -> str:
    with pytest.raises(UsageError) as caught:
        prove(comm, name, "mlp", plan)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("lbfgs", "dp=2,zero=1", "LBFGS looks at all parameters at once"),
        ("lbfgs", "pp=2,microbatches=2", "LBFGS looks at all parameters at once"),
        ("lbfgs", "tp=2", "LBFGS looks at all parameters at once"),
        ("adafactor", "tp=2", "Adafactor uses a parameter as one tensor"),
        ("muon", "tp=2,zero=1", "Muon uses a parameter as one tensor"),
    ],
)
def test_what_cannot_be_right_is_refused(pools: Pools, name: str, plan: str, words: str) -> None:
    for reported in pools("gloo", 2).run(refused, name, plan):
        assert words in reported
