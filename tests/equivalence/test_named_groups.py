"""Parameter groups by name: under every plan each parameter has the options that it has on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.apply import parallelize
from unisono.plan.plan import Plan
from unisono.verify.verify import Verdict, verify_here

Pools = Callable[[str, int], RankPool]
GROUPS: dict[str, Any] = {
    "head.*": {"lr": 0.03},
    "*.bias|*norm*": {"weight_decay": 0.0, "lr": 0.002},
    "blocks.0.*": {"betas": (0.8, 0.9)},
}
PLANS = ["dp=2", "tp=2", "pp=2,microbatches=2", "dp=2,zero=3", "dp=2,zero=1", "dp=2,pp=2,microbatches=2,zero=3"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :4].argmax(1)


TASK = uni.Task(model=Net, loss=nn.functional.cross_entropy, optimizer=uni.grouped(adamw, GROUPS), batch=batch)


def prove(comm: Communicator, plan: str) -> Verdict:
    return verify_here(comm, TASK, Plan.parse(plan), steps=2)


def trained_alone(groups: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    model = Net()
    optimizer = uni.grouped(adamw, groups)(model.named_parameters())
    for seed in range(2):
        x, y = batch(seed)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_changes_nothing(pools: Pools, plan: str) -> None:
    verdict = pools("gloo", Plan.parse(plan).world).run(prove, plan)[0]
    assert verdict.equivalent, verdict


def test_each_pattern_counts() -> None:
    """Proofs with groups that change nothing would prove nothing."""
    for pattern in GROUPS:
        others = {name: options for name, options in GROUPS.items() if name != pattern}
        assert not torch.equal(trained_alone(GROUPS), trained_alone(others)), pattern


def groups_of(comm: Communicator, plan: str) -> list[tuple[int, float, float]]:
    given = parallelize(Net, plan, loss=TASK.loss, optimizer=TASK.optimizer, example=batch(0))
    state = given.state_dict()["optimizer"]["param_groups"]
    assert [len(group["params"]) for group in state] == [7, 2, 11, 2]  # of the full model, by all ranks
    return [(len(group["params"]), group["lr"], group["weight_decay"]) for group in given.optimizer.param_groups]


def test_a_stage_without_members_has_the_group_all_the_same(pools: Pools) -> None:
    first, last = pools("gloo", 2).run(groups_of, "pp=2,microbatches=2")
    assert [lr for _, lr, _ in first] == [lr for _, lr, _ in last] == [0.01, 0.03, 0.002, 0.01]
    assert first[1][0] == 0
    assert last[1][0] == 2
    assert last[3][0] == 0


def trained(comm: Communicator, folder: str, plan: str, steps: int) -> list[float]:
    data = [(x, y) for seed in range(6) for x, y in zip(*batch(seed), strict=True)]
    engine = uni.Engine(
        Net, nn.functional.cross_entropy, adamw, plan=plan, parameter_groups=GROUPS, check="off",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step] * 4),
    )  # fmt: skip
    history = engine.fit(data, epochs=1, max_steps=steps, batch_size=8, save=folder, resume=True, progress=False)
    return history.losses


@pytest.mark.thorough
def test_the_engine_resumes_them_under_another_plan(pools: Pools, tmp_path: Any) -> None:
    pool = pools("gloo", 2)
    whole = pool.run(trained, str(tmp_path / "whole"), "dp=2", 6)[0]
    begun = pool.run(trained, str(tmp_path / "parts"), "pp=2,microbatches=2", 3)[0]
    rest = pool.run(trained, str(tmp_path / "parts"), "dp=2,zero=3", 6)[0]
    assert begun + rest == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({}, "expected options by patterns"),
        ({"head.*": {}}, "'head.*' has {}; expected options"),
        ({"head.*": {"params": []}}, "sets params"),
        ({"haed.*": {"lr": 1.0}}, "'haed.*' matches no parameter; the model has embed.weight, embed.bias"),
        ({"*": {"lr": 1.0}, "head.*": {"lr": 2.0}}, "all that 'head.*' matches is in the group of '*'"),
        ({"head.*": {"learning_rate": 1.0}}, "sets 'learning_rate', which AdamW does not have; expected one of its"),
    ],
)
def test_what_is_refused(pools: Pools, groups: Any, words: str) -> None:
    for text in pools("gloo", 2).run(refused, groups):
        assert words in text
        assert "\n" not in text


def refused(comm: Communicator, groups: Any) -> str:
    with pytest.raises(UsageError) as caught:
        uni.Engine(Net, nn.functional.cross_entropy, adamw, plan="dp=2", parameter_groups=groups).prepare(batch(0))
    return str(caught.value)


def test_names_are_needed() -> None:
    with pytest.raises(UsageError, match="use named_parameters"):
        uni.grouped(adamw, GROUPS)(Net().parameters())
