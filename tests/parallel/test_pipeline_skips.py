"""Models that carry tensors round their blocks, write to their inputs or compute weights in hooks, in a pipeline."""

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
from unisono.parallel.apply import parallelize
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
WIDTH = 8


class Branch(nn.Module):
    """What a residual block adds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(self.norm(x)).tanh())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Branch() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Written(Residual):
    """The sum is written to what the block gave, and the first tensor is needed at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x).add_(x)
        return self.head(x) * first.sigmoid()


class Collected(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [self.embed(x)]
        for block in self.blocks:
            states.append(states[-1] + block(states[-1]))
        return self.head(torch.stack(states).mean(0))


class Lists(nn.Module):
    """Norms, first and second parts of the layers in lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.second = nn.ModuleList(Branch() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, first, second in zip(self.norms, self.first, self.second, strict=True):
            x = x + first(norm(x)).tanh()
            x = x + second(x)
        return x


class Exits(Residual):
    """Every block has a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        outputs = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            outputs.append(head(x))
        return sum(outputs)  # type: ignore[return-value]


class UNet(nn.Module):
    """The halves are of different widths; each level of the second half reads that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(WIDTH, 12), nn.Linear(12, 6)
        self.middle = nn.Linear(6, 6)
        self.up2, self.up1 = nn.Linear(12, 10), nn.Linear(22, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x).tanh()
        second = self.down2(first).tanh()
        x = self.up2(torch.cat([self.middle(second).tanh(), second], -1))
        return self.up1(torch.cat([x, first], -1))


class InPlace(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return super().forward(x)


class Hooked(Residual):
    """torch's old weight_norm computes weights in hooks, and keeps them on the modules."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.weight_norm(block.fc1)


MODELS: dict[str, type[nn.Module]] = {
    each.__name__: each for each in (Residual, Written, Collected, Lists, Exits, UNet, InPlace, Hooked)
}


def task_of(model: Callable[[], nn.Module]) -> Task:
    def batch(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)

    return Task(
        model=model,
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch=batch,
    )


def proved(comm: Communicator, name: str, plan: str) -> str:
    verdict = verify_here(comm, task_of(MODELS[name]), Plan.parse(plan), steps=2)
    return "" if verdict.equivalent else str(verdict)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("name", MODELS)
def test_the_result_is_that_of_one_process(pools: Pools, name: str) -> None:
    assert pools("gloo", 2).run(proved, name, "pp=2,microbatches=2") == ["", ""]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("Residual", "pp=4,microbatches=4,schedule=zb1p"),
        ("Collected", "pp=4,microbatches=2"),
        ("UNet", "pp=2,microbatches=2,chunks=2,schedule=zbv"),
        ("Lists", "dp=2,pp=2,microbatches=2,zero=3"),
    ],
)
def test_under_other_plans(pools: Pools, name: str, plan: str) -> None:
    ranks = Plan.parse(plan).world
    assert pools("gloo", ranks).run(proved, name, plan) == [""] * ranks


def refusals(comm: Communicator) -> list[str]:
    task = task_of(Residual)
    trainer = parallelize(
        task.model, "pp=2,microbatches=2", loss=task.loss, optimizer=task.optimizer, example=task.batch(0)
    )
    found = []
    first = trainer.model.get_submodule("blocks.0.fc1")
    for act in (partial(trainer.model, task.batch(0)[0]), partial(first, torch.ones(2, WIDTH))):
        try:
            act()
            found.append("")
        except UsageError as error:
            found.append(str(error))
    trainer.step(task.batch(0))
    return found


def test_a_stage_is_not_the_full_model(pools: Pools) -> None:
    first, second = pools("gloo", 2).run(refusals)
    assert "use trainer.step, trainer.evaluate, trainer.predict or trainer.generate" in first[0]
    assert first[0] == second[0]
    assert not first[1]  # it is here
    assert "Residual only" in second[1]
