"""The reference is one device: a task that reads the rank or the world size is not equivalent, wherever it does so."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.verify.task import Task
from unisono.verify.verdict import Verdict
from unisono.verify.verify import verify_here


class Scaled(nn.Module):
    """Divides by a number that is known when it is built, or when it runs."""

    def __init__(self, when_built: Callable[[], int] = lambda: 1, when_run: Callable[[], int] = lambda: 1) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)
        self.divisor = when_built()
        self.when_run = when_run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(torch.tanh(self.inner(x)))
        return hidden / self.divisor / self.when_run()


def torch_world() -> int:
    return dist.get_world_size()


def torch_world_if_any() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def unisono_world() -> int:
    return uni.world_size()


def variable_world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


plain = Task(Scaled, F.cross_entropy, sgd, batch)
TASKS = {
    "plain": plain,
    "world_loss": replace(plain, loss=lambda out, targets: F.cross_entropy(out, targets) / torch_world()),
    "world_loss_if_any": replace(plain, loss=lambda out, targets: F.cross_entropy(out, targets) / torch_world_if_any()),
    "world_model": replace(plain, model=lambda: Scaled(when_built=unisono_world)),
    "world_forward": replace(plain, model=lambda: Scaled(when_run=torch_world_if_any)),
    "world_lr": replace(plain, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1 * unisono_world())),
    "variable_model": replace(plain, model=lambda: Scaled(when_built=variable_world)),
    "variable_lr": replace(plain, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1 * variable_world())),
}


def judged(comm: Communicator, name: str, plan: str) -> Verdict:
    os.environ["WORLD_SIZE"] = str(comm.size)
    try:
        return verify_here(comm, TASKS[name], uni.Plan.parse(plan), steps=1)
    finally:
        del os.environ["WORLD_SIZE"]


@pytest.mark.parametrize("name", TASKS)
def test_what_reads_the_world_is_not_equivalent(pools: Callable[[str, int], RankPool], name: str) -> None:
    verdicts = pools("gloo", 2).run(judged, name, "dp=2")
    assert [each.equivalent for each in verdicts] == [name == "plain"] * 2, verdicts[0]
