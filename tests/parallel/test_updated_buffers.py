"""Buffers that a forward pass updates, and hooks on gradients: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
Update = Callable[[nn.Module, torch.Tensor], None]


def _count(net: Any, x: torch.Tensor) -> None:
    net.steps += 1


def _count_samples(net: Any, x: torch.Tensor) -> None:
    net.steps += len(x)


def _mean(net: Any, x: torch.Tensor) -> None:
    net.mean.lerp_(x.detach().mean().expand(3), 0.1)


def _mean_through_a_view(net: Any, x: torch.Tensor) -> None:
    net.mean[0] = x.detach().mean()


def _mean_anew(net: Any, x: torch.Tensor) -> None:
    net.mean = 0.9 * net.mean + x.detach().mean()


def _nothing(net: Any, x: torch.Tensor) -> None:
    pass


class Net(nn.Module):
    def __init__(self, update: Update, is_spectral: bool = False, is_hooked: bool = False) -> None:
        super().__init__()
        self.update = update
        layers = [nn.Linear(4, 4) for _ in range(3)]
        self.blocks = nn.ModuleList(map(nn.utils.spectral_norm, layers) if is_spectral else layers)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        if is_hooked:
            self.blocks[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        self.update(self, x)
        return x + self.mean.detach().sum()


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def _outcome(comm: Communicator, plan: str, *options: Any) -> str:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    task = Task(model=lambda: Net(*options), loss=F.mse_loss, optimizer=optimizer, batch=_batch)
    try:
        verdict = verify_here(comm, task, Plan.parse(plan), steps=2)
    except UsageError as error:
        return str(error)
    assert verdict.equivalent, verdict
    return "equivalent"


@pytest.mark.parametrize("update", [_count_samples, _mean, _mean_through_a_view, _mean_anew])
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "pp=2,microbatches=2"])
def test_statistics_of_samples_are_refused(pools: Pools, update: Update, plan: str) -> None:
    for reported in pools("gloo", 2).run(_outcome, plan, update):
        assert "from the samples of a batch" in reported


def test_a_counter_of_steps_counts_steps(pools: Pools) -> None:
    assert pools("gloo", 2).run(_outcome, "dp=2,zero=1", _count)[0] == "equivalent"
    assert pools("gloo", 2).run(_outcome, "dp=2,recompute=full", _count)[0] == "equivalent"
    assert "make more passes" in pools("gloo", 2).run(_outcome, "dp=2,microbatches=2", _count)[0]


def test_spectral_norm_of_either_kind_goes_on_once_a_step(pools: Pools) -> None:
    assert pools("gloo", 2).run(_outcome, "dp=2", _nothing, True)[0] == "equivalent"
    for plan in ("dp=2,microbatches=2", "dp=2,recompute=full", "pp=2,microbatches=2"):
        for reported in pools("gloo", 2).run(_outcome, plan, _nothing, True):
            assert "has a spectral norm that goes on" in reported


def test_hooks_on_gradients_are_refused(pools: Pools) -> None:
    for reported in pools("gloo", 2).run(_outcome, "dp=2", _nothing, False, True):
        assert "blocks.0.weight has a hook on its gradient" in reported
