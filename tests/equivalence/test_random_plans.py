"""Random models under random plans: the result of one device, or one clear refusal on every rank, and never a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import unisono as uni
from examples.gpt import GPT, Config
from tests.equivalence.tasks import GPT_RULES, MLPBlock
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.plan.plan import Plan
from unisono.verify.compare import Verdict
from unisono.verify.plan_grid import plans_for
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
Spec = dict[str, Any]


# ---- random tasks ----------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, inputs: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(MLPBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


@st.composite
def stacks(draw: st.DrawFn) -> Spec:
    return {
        "kind": "stack",
        "sizes": (draw(st.integers(1, 7)), draw(st.integers(2, 13)), draw(st.integers(2, 5)), draw(st.integers(2, 7))),
        "rows": draw(st.integers(1, 11)),
        "clip": draw(st.sampled_from([None, 0.1])),
    }


@st.composite
def transformers(draw: st.DrawFn) -> Spec:
    heads = draw(st.integers(1, 6))
    return {
        "kind": "gpt",
        "heads": heads,
        "width": heads * draw(st.integers(1, 4)),
        "layers": draw(st.integers(2, 3)),
        "vocabulary": draw(st.integers(3, 29)),
        "length": draw(st.integers(2, 13)),
        "rows": draw(st.integers(1, 9)),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "ignored": draw(st.sampled_from([0.0, 0.4])),
        "whole head": draw(st.booleans()),
        "clip": draw(st.sampled_from([None, 0.1])),
    }


def plans(ranks: int) -> st.SearchStrategy[Plan]:
    shapes = st.sampled_from(plans_for(ranks))
    more = st.fixed_dictionaries(
        {},
        optional={"microbatches": st.integers(1, 5), "recompute": st.sampled_from(["full", "selective", "attention"])},
    )
    return st.builds(lambda plan, changes: plan.but(**changes), shapes, more)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def task_of(spec: Spec) -> uni.Task:
    if spec["kind"] == "stack":
        inputs, _, _, classes = spec["sizes"]

        def vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(spec["rows"], inputs, generator=generator)
            return x, torch.randint(classes, (spec["rows"],), generator=generator)

        rules = {"blocks.*.fc1": "column", "blocks.*.fc2": "row"}
        return uni.Task(lambda: Stack(*spec["sizes"]), F.cross_entropy, _adam, vectors, rules=rules, clip=spec["clip"])

    config = Config(
        vocabulary=spec["vocabulary"],
        context=16,
        width=spec["width"],
        heads=spec["heads"],
        layers=spec["layers"],
        dropout=spec["dropout"],
    )

    def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (spec["rows"], spec["length"])
        x = torch.randint(spec["vocabulary"], shape, generator=generator)
        y = torch.randint(spec["vocabulary"], shape, generator=generator)
        y[torch.rand(shape, generator=generator) < spec["ignored"]] = -100
        y[0, 0] = 0  # something counts
        return x, y

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    rules = GPT_RULES if spec["whole head"] else GPT_RULES | {"tokens": "vocab", "head": "column_gather"}
    return uni.Task(lambda: GPT(config), loss, _adam, tokens, rules=rules, clip=spec["clip"])


# ---- what must hold --------------------------------------------------------------------------------------------------


def outcome(comm: Communicator, spec: Spec, plan: Plan) -> Verdict | str:
    try:
        return verify_here(comm, task_of(spec), plan, steps=2)
    except UsageError as error:
        return str(error)


def check(pool: RankPool, spec: Spec, plan: Plan) -> None:
    outcomes = pool.run(outcome, spec, plan)
    if isinstance(outcomes[0], Verdict):
        assert all(isinstance(each, Verdict) and each.equivalent for each in outcomes), (spec, str(plan), outcomes)
    else:
        assert all(isinstance(each, str) and len(each) > 20 for each in outcomes), (spec, str(plan), outcomes)


few = settings(
    max_examples=5,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("ranks", [2, 4])
@given(data=st.data())
@few
def test_a_random_stack(pools: Pools, ranks: int, data: st.DataObject) -> None:
    check(pools("gloo", ranks), data.draw(stacks()), data.draw(plans(ranks)))


@pytest.mark.parametrize("ranks", [2, 4])
@given(data=st.data())
@few
def test_a_random_transformer(pools: Pools, ranks: int, data: st.DataObject) -> None:
    check(pools("gloo", ranks), data.draw(transformers()), data.draw(plans(ranks)))
