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
from unisono.parallel.task import Task
from unisono.verify.compare import Verdict
from unisono.verify.verify import verify, verify_here


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


class Shifted(Scaled):
    """Adds the rank to what an inner layer gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(torch.tanh(self.inner(x) + uni.rank()))
        return hidden


plain = Task(Scaled, F.cross_entropy, sgd, batch)
# The task, and what is said to be the first divergence.
TASKS = {
    "plain": (plain, ""),
    "world_loss": (
        replace(plain, loss=lambda out, targets: F.cross_entropy(out, targets) / torch_world()),
        "activations agree, the loss does not",
    ),
    "world_loss_if_any": (
        replace(plain, loss=lambda out, targets: F.cross_entropy(out, targets) / torch_world_if_any()),
        "the loss function depends on the rank or the world size",
    ),
    "world_model": (
        replace(plain, model=lambda: Scaled(when_built=unisono_world)),
        "on every rank it is 2 times too small, which is dp: does this forward read the world size?",
    ),
    "world_forward": (
        replace(plain, model=lambda: Scaled(when_run=torch_world_if_any)),
        "; on every rank it is 2 times too small",
    ),
    "world_lr": (
        replace(plain, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1 * unisono_world())),
        "the optimizer's lr is 0.2 under the plan and 0.1 on one device: does it read the rank or the world size?",
    ),
    "variable_model": (replace(plain, model=lambda: Scaled(when_built=variable_world)), "2 times too small"),
    "variable_lr": (
        replace(plain, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1 * variable_world())),
        "the optimizer's lr is 0.2 under the plan",
    ),
    "rank_forward": (
        replace(plain, model=Shifted),
        "it differs on rank 1 and agrees on rank 0: does this forward depend on the rank?",
    ),
}


def judged(comm: Communicator, name: str, plan: str) -> Verdict:
    os.environ["WORLD_SIZE"] = str(comm.size)
    try:
        return verify_here(comm, TASKS[name][0], uni.Plan.parse(plan), steps=1)
    finally:
        del os.environ["WORLD_SIZE"]


@pytest.mark.parametrize("name", TASKS)
def test_what_reads_the_world_is_not_equivalent(pools: Callable[[str, int], RankPool], name: str) -> None:
    verdicts = pools("gloo", 2).run(judged, name, "dp=2")
    assert [each.equivalent for each in verdicts] == [name == "plain"] * 2, verdicts[0]
    assert TASKS[name][1] in verdicts[0].first_divergence, verdicts[0]


_remembered: dict[str, int] = {}


def remembered_world() -> int:
    """What this process has seen first: a rank that trains under the plan and then alone sees the plan's."""
    return _remembered.setdefault("size", uni.world_size())


def test_the_reference_of_the_command_is_a_process_of_its_own() -> None:
    verdict = verify(replace(plain, model=lambda: Scaled(when_run=remembered_world)), "dp=2", steps=1)
    assert not verdict.equivalent
    assert "does this forward read the world size?" in verdict.first_divergence
    assert verify(plain, "dp=2", steps=1).equivalent
