"""Python that sees the values of tensors while the stages of a pipeline run: as on one device, or refused on all ranks.

Every stage runs the model's own forward, but has the values of its own parameters and blocks only."""

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
WIDTH, WORDS = 6, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """Scaled by a number that is read before, between or after the blocks."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def before(self, x: torch.Tensor) -> Any:
        return 1.0

    def between(self, number: int, x: torch.Tensor) -> Any:
        return 1.0

    def after(self) -> Any:
        return 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        factor = self.before(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            factor = factor * self.between(number, x)
        return self.head(x) * (factor * self.after())


class ItemAfter(Net):
    def after(self) -> Any:
        return self.embed.weight.detach().mean().item()


class ArithmeticAfter(Net):
    def after(self) -> Any:
        return self.embed.weight.detach().mean() + self.blocks[0].up.weight.data.sum()  # type: ignore[union-attr,operator]


class ListAfter(Net):
    def after(self) -> Any:
        return self.embed.weight.tolist()[0][0]


class NormBefore(Net):
    def before(self, x: torch.Tensor) -> Any:
        return self.embed.weight.norm().item()


class FloatBefore(Net):
    def before(self, x: torch.Tensor) -> Any:
        return float(self.head.weight.sum().detach()) + float(x.detach().abs().max())


class BranchBefore(Net):
    def before(self, x: torch.Tensor) -> Any:
        return 2.0 if x.detach().mean() > 0 else 3.0


class MaskBefore(Net):
    def before(self, x: torch.Tensor) -> Any:
        return len(x.detach()[x.detach() > 0]) + 1.0


class WrittenBetweenReads(Net):
    def before(self, x: torch.Tensor) -> Any:
        copy = x.detach().clone()
        first = copy.sum().item()
        copy.mul_(2)
        return first + copy.sum().item()


class Between(Net):
    def between(self, number: int, x: torch.Tensor) -> Any:
        return {0: lambda: float(x.detach().abs().max()), 2: lambda: x.detach().mean().tolist()}.get(
            number, lambda: 1.0
        )()


class Averaging(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running.mul_(0.9).add_(0.1 * x.detach().mean())
        return super().forward(x)


class BufferOfBlock(Net):
    block = Averaging

    def after(self) -> Any:
        return 1 + self.blocks[0].running  # type: ignore[operator,union-attr]


class BufferBefore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def before(self, x: torch.Tensor) -> Any:
        self.seen += self.embed.weight.detach().mean()
        return 1.0

    def after(self) -> Any:
        return 1 + self.seen.item()


class BufferOfHead(BufferBefore):
    def before(self, x: torch.Tensor) -> Any:
        self.seen += self.head.weight.detach().mean()
        return 1.0

    def after(self) -> Any:
        return 1 + self.seen


class Keeping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = float(x.detach().mean())
        return super().forward(x)


class AttributeOfBlock(Net):
    block = Keeping

    def after(self) -> Any:
        return 1 + self.blocks[0].kept  # type: ignore[operator,union-attr]


RIGHT = (
    ItemAfter, ArithmeticAfter, ListAfter, NormBefore, FloatBefore, BranchBefore, MaskBefore, WrittenBetweenReads,
    Between,
)  # fmt: skip
REFUSED = {
    BufferOfBlock: "writes to the buffer blocks.0.running in or after blocks.0",
    BufferBefore: "writes to the buffer seen in or after blocks.0, and also uses it in or after blocks.3",
    BufferOfHead: "writes to the buffer seen",
    AttributeOfBlock: "stage 1 of AttributeOfBlock fails without the blocks of the other stages",
}


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (4, 5), generator=drawn), torch.randint(WORDS, (4, 5), generator=drawn)


def per_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def came(comm: Communicator, build: type[nn.Module], plan: str = "pp=2") -> str:
    """ "" where the plan is equivalent, else why not."""
    task = Task(build, per_token, partial(torch.optim.AdamW, lr=0.01), tokens)
    try:
        verdict = verify_here(comm, task, Plan.parse(plan), 2)
    except UsageError as error:
        return str(error)
    return "" if verdict.equivalent else f"not equivalent: {verdict}"


@pytest.mark.parametrize("build", RIGHT, ids=lambda build: build.__name__)
def test_values_read_on_one_stage_are_those_of_all(pools: Pools, build: type[nn.Module]) -> None:
    assert pools("gloo", 2).run(came, build) == ["", ""]


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_values_that_stay_on_one_stage_are_refused_on_all_ranks(pools: Pools, build: type[nn.Module]) -> None:
    for reported in pools("gloo", 2).run(came, build):
        assert REFUSED[build] in reported
        assert "pp=1" in reported


def check_reading_loss(comm: Communicator, build: type[nn.Module]) -> str:
    torch.manual_seed(0)
    model = build()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return per_token(outputs, targets) + 0.1 * model.head.weight.square().sum()  # type: ignore[union-attr,operator]

    make = partial(torch.optim.SGD, lr=0.1)
    try:
        parallelize(model, "pp=2,microbatches=2", loss=loss, optimizer=make, example=tokens(0)).step(tokens(0))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("build", [Net, NormBefore], ids=lambda build: build.__name__)
def test_a_loss_that_reads_parameters_is_refused_on_all_ranks(pools: Pools, build: type[nn.Module]) -> None:
    for reported in pools("gloo", 2).run(check_reading_loss, build):
        assert (
            "the loss reads head.weight, but ranks of a pipeline hold the parameters of their stages only" in reported
        )
