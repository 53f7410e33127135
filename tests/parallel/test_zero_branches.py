"""ZeRO's third stage where ranks take different ways through a model, or run a backward of a backward."""

from __future__ import annotations

import copy
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.fc1(x).tanh())


class Chosen(nn.Module):
    """Each sample goes through some of the blocks: a block that no sample here needs is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def order(self, x: torch.Tensor) -> Any:
        return enumerate(self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = x[:, :4].detach()
        for number, block in self.order(x):
            chosen = choice[:, number] > 0
            if bool(chosen.any()):
                x = torch.where(chosen[:, None], block(x), x)
        return self.head(x)


class Sorted(Chosen):
    """The sums of all blocks, which each rank takes in an order of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[0, :4].argsort().tolist()
        parts = {number: self.blocks[number](x) for number in order}
        return self.head(sum(parts[number] for number in range(4)))  # type: ignore[arg-type]


class Exit(Chosen):
    """Ends before the last blocks where no sample here needs more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        depth = (x[:, 0].detach() * 2).abs().clamp(max=3).long()
        for number, block in enumerate(self.blocks):
            if bool((depth < number).all()):
                break
            x = torch.where((depth >= number)[:, None], block(x), x)
        return self.head(x)


class Picked(Chosen):
    """Blocks see the samples that a mask picks; a block for which there are none is not called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = x
        for number, block in enumerate(self.blocks):
            mask = inputs[:, number] > 0
            picked = x[mask]
            if len(picked):
                x = x.masked_scatter(mask[:, None], block(picked))
        return self.head(x)


class Handing(nn.Module):
    """The first block makes a bias of its own parameter, and all hand it on, as those of T5 do."""

    class Layer(Block):
        def __init__(self, has_bias: bool) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(WIDTH)) if has_bias else None

        def forward(self, x: torch.Tensor, bias: Any = None) -> Any:  # type: ignore[override]
            bias = self.bias.tanh() if bias is None and self.bias is not None else bias
            return super().forward(x + bias), bias

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Layer(number == 0) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class Viewed(Handing):
    """Blocks hand on a view of a parameter, another one weighs them, and the model returns a third."""

    class Layer(Handing.Layer):
        def forward(self, x: torch.Tensor, bias: Any = None) -> Any:  # type: ignore[override]
            bias = self.bias[None, :] if bias is None and self.bias is not None else bias
            return Block.forward(self, x + bias), bias

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Parameter(torch.rand(4)), nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        bias = None
        for block, weight in zip(self.blocks, self.mix, strict=True):
            y, bias = block(x, bias)
            x = x + weight * y
        return x, self.scale[1]


def scaled_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    x, scale = outputs if isinstance(outputs, tuple) else (outputs, 1.0)
    return F.mse_loss(x * scale, targets)


class Written(nn.Module):
    """Writes to what its layers return, which is a view of something else where nn.Linear was given three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.places = nn.Parameter(torch.rand(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.stack([x, x.sin()], 1)
        for block in self.blocks:
            x = block(x)
            x += self.places
            x = x.tanh()
        return x.sum(1)


class Penalised(Chosen):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        y = self.head(y)
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            y = y + slope
        return y


MODELS: dict[str, type[nn.Module]] = {
    each.__name__: each for each in (Chosen, Sorted, Exit, Picked, Handing, Viewed, Written, Penalised)
}


def task_of(name: str) -> Task:
    def batch(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)
        return (inputs.abs() if seed == 0 else inputs), targets  # Chosen and Picked call all blocks in the first step

    return Task(
        model=MODELS[name],
        loss=scaled_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch=batch,
    )


def proved(comm: Communicator, name: str, plan: str) -> str:
    try:
        verdict = verify_here(comm, task_of(name), Plan.parse(plan), steps=3)
    except UsageError as error:
        return str(error)
    return "" if verdict.equivalent else str(verdict)


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2,zero=3,recompute=full,microbatches=2"])
@pytest.mark.parametrize("name", ["Chosen", "Sorted", "Exit", "Picked", "Handing"])
def test_ranks_may_take_different_ways(pools: Pools, name: str, plan: str) -> None:
    assert pools("gloo", 2).run(proved, name, plan) == ["", ""]


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2,zero=3,recompute=full", "dp=2,pp=2,zero=3"])
def test_views_of_parameters_outlive_their_unit(pools: Pools, plan: str) -> None:
    size = 4 if "pp" in plan else 2
    assert pools("gloo", size).run(proved, "Viewed", plan) == [""] * size


def test_outputs_may_be_written_to(pools: Pools) -> None:
    assert pools("gloo", 2).run(proved, "Written", "dp=2,zero=3") == ["", ""]


def test_a_backward_of_a_backward_is_refused(pools: Pools) -> None:
    for reported in pools("gloo", 2).run(proved, "Penalised", "dp=2,zero=3"):
        assert "computes gradients during the forward" in reported
        assert "use zero=2" in reported


def penalty_of_own(comm: Communicator) -> str:
    """A gradient penalty after the forward, in a loop of one's own."""
    torch.manual_seed(0)
    trainer = parallelize(MODELS["Handing"](), "dp=2,zero=3", loss=F.mse_loss, optimizer=torch.optim.SGD)
    inputs = torch.randn(4, WIDTH, requires_grad=True)
    try:
        torch.autograd.grad(trainer.model(inputs).square().sum(), inputs, create_graph=True)
    except UsageError as error:
        return str(error)
    return ""


def test_a_penalty_in_a_loop_of_ones_own_is_refused(pools: Pools) -> None:
    for reported in pools("gloo", 2).run(penalty_of_own):
        assert "create_graph=True" in reported
        assert "use zero=2" in reported


class ExitInEvaluation(Exit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def predicted_after_training(comm: Communicator) -> float:
    torch.manual_seed(0)
    plain = ExitInEvaluation().double()
    optimizer = partial(torch.optim.SGD, lr=0.1)
    trainer = parallelize(copy.deepcopy(plain), "dp=2,zero=3", loss=F.mse_loss, optimizer=optimizer)
    stepping = optimizer(plain.parameters())
    for seed in range(2):
        inputs, targets = (each.double() for each in task_of("Exit").batch(seed))
        trainer.step((inputs, targets))
        stepping.zero_grad()
        F.mse_loss(plain(inputs), targets).backward()
        stepping.step()
    shallow = torch.cat([torch.zeros(2, WIDTH), torch.full((2, WIDTH), 2.0)]).double()  # rank 0 leaves early
    with torch.no_grad():
        return float((trainer.predict(shallow) - plain.eval()(shallow)).abs().max())


def test_an_early_exit_in_evaluation_only(pools: Pools) -> None:
    assert max(pools("gloo", 2).run(predicted_after_training)) < 1e-12
