"""zero_grad, backward, update: an ordinary loop with a trainer. Gradients add up as in torch, under every plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.errors import UsageError

PLANS = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=2,microbatches=2",
    "tp=2",
    "pp=2,microbatches=2",
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.unused = nn.Linear(8, 2)  # never has a gradient
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


RULES = {"blocks.*.0": "column", "blocks.*.2": "row"}


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(number)
    return torch.randn(6, 6, generator=made).double(), torch.randint(3, (6,), generator=made)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def by_torch() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = initial_model()
    optimized = optimizer(model.parameters())
    losses = []
    for step in range(2):
        optimized.zero_grad()
        for number in (2 * step, 2 * step + 1):  # of several batches, the mean
            loss = nn.functional.cross_entropy(model(batch(number)[0]), batch(number)[1])
            (loss / 2).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimized.step()
    nn.functional.cross_entropy(model(batch(9)[0]), batch(9)[1]).backward()  # on top of those that were used
    optimized.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def initial_model() -> nn.Module:
    model = Net().double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def by_trainer(comm: Any, plan: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    options = {"loss": nn.functional.cross_entropy, "optimizer": optimizer, "rules": RULES, "check": "off"}
    trainer = uni.parallelize(initial_model(), plan, example=batch(0), **options)
    losses = []
    for step in range(2):
        trainer.zero_grad()
        for number in (2 * step, 2 * step + 1):
            losses.append(float(trainer.backward(batch(number), scale=1 / 2)))
        trainer.clip_grad_norm_(0.5)
        trainer.update()
    trainer.backward(batch(9))
    trainer.update()
    return losses, trainer.state_dict()["model"]


def require_same(found: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, model = by_torch()
    assert found[0] == pytest.approx(losses, rel=1e-9)
    assert found[1].keys() == model.keys()
    for name, value in model.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_one_device_is_torch(pools: Callable[[str, int], RankPool]) -> None:
    require_same(pools("gloo", 1).run(by_trainer, "dp=1")[0])


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_changes_nothing(plan: str, pools: Callable[[str, int], RankPool]) -> None:
    for found in pools("gloo", 2).run(by_trainer, plan):
        require_same(found)


def overflowing(comm: Any) -> tuple[int, bool]:
    """The first of two backwards overflows in float16: the step is skipped, as the gradients have an inf."""
    options = {"loss": nn.functional.cross_entropy, "optimizer": optimizer, "check": "off", "precision": "fp16"}
    trainer = uni.parallelize(initial_model().float(), "dp=2", **options)
    before = trainer.state_dict()["model"]["first.weight"].clone()
    x, y = batch(0)
    trainer.backward((x.float() * 1e30, y))
    trainer.backward((x.float(), y))
    trainer.update()
    return trainer.skipped, torch.equal(trainer.state_dict()["model"]["first.weight"], before)


def test_an_overflow_in_any_backward_of_a_step_skips_it(pools: Callable[[str, int], RankPool]) -> None:
    assert pools("gloo", 2).run(overflowing) == [(1, True), (1, True)]


def given_a_loss(comm: Any) -> str:
    options = {"loss": nn.functional.cross_entropy, "optimizer": optimizer, "check": "off"}
    trainer = uni.parallelize(initial_model(), "dp=1", **options)
    loss = nn.functional.cross_entropy(trainer.model(batch(0)[0]), batch(0)[1])
    with pytest.raises(UsageError) as refused:
        trainer.backward(loss)  # type: ignore[arg-type]
    return str(refused.value)


def test_a_loss_instead_of_a_batch_is_refused(pools: Callable[[str, int], RankPool]) -> None:
    assert "expected the batch" in pools("gloo", 1).run(given_a_loss)[0]
