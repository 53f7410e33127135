"""Random ops that nothing replaces: refused under a plan with the line that calls them, and torch's own elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import alpha_dropout, dropout, rrelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.deferred_init.seeded_init import build
from unisono.mesh.random.state import RandomState
from unisono.parallel.task import Task
from unisono.verify.float64 import Float64Mode
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
Draw = Callable[[torch.Tensor], object]
rand, randn_like, randperm = torch.rand, torch.randn_like, torch.randperm  # as from torch import rand

REFUSED: dict[str, tuple[Draw, str]] = {
    "random_": (lambda x: x.clone().random_(), "use torch.randint"),
    "random_ to a limit": (lambda x: torch.empty(3, dtype=torch.int64).random_(7), "use torch.randint"),
    "torch.dropout": (lambda x: torch.dropout(x, 0.5, True), "call it as torch.nn.functional.dropout"),
    "torch.dropout_": (lambda x: torch.dropout_(x.clone(), 0.5, True), "call it as torch.nn.functional.dropout"),
    "torch.feature_dropout": (lambda x: torch.feature_dropout(x, 0.5, True), "call it as torch.nn.functional.dropout"),
    "torch.native_dropout": (lambda x: torch.native_dropout(x, 0.5, True), "call it as torch.nn.functional.dropout"),
    "dropout by name": (lambda x: dropout(x, 0.5), "and not by a name that was imported from there"),
    "alpha_dropout by name": (lambda x: alpha_dropout(x, 0.5, True), "call it as torch.nn.functional.alpha_dropout"),
    "rrelu by name": (lambda x: rrelu(x, training=True), "call it as torch.nn.functional.rrelu"),
    "attention by name": (lambda x: scaled_dot_product_attention(x, x, x, dropout_p=0.5), "torch.nn.functional"),
    "rand by name": (lambda x: rand(3), "call it as torch.rand, and not by a name"),
    "randn_like by name": (lambda x: randn_like(x), "call it as torch.randn_like"),
    "randperm by name": (lambda x: randperm(5), "call it as torch.randperm"),
    "rand with out=": (lambda x: torch.rand(3, out=torch.empty(3)), "or with out="),
    "complex numbers": (lambda x: torch.randn(3, dtype=torch.complex64), "call it as torch.randn"),
    "poisson": (lambda x: torch.poisson(x.abs()), "use torch.rand, torch.randn"),
    "binomial": (lambda x: torch.binomial(x.abs().round(), x.sigmoid()), "use torch.rand, torch.randn"),
    "gamma": (lambda x: torch.distributions.Gamma(2.0, 1.0).sample(), "use torch.rand, torch.randn"),
    "LSTM": (lambda x: nn.LSTM(4, 4, 2, dropout=0.5)(x[0]), "num_layers=1 with nn.Dropout between them"),
}  # fmt: skip
ALLOWED: dict[str, Draw] = {
    "a generator": lambda x: rand(3, generator=torch.Generator()),
    "a generator for a method": lambda x: x.clone().random_(generator=torch.Generator()),
    "evaluation": lambda x: torch.dropout(x, 0.5, False),
    "p=0": lambda x: dropout(x, 0.0),
    "attention without dropout": lambda x: scaled_dot_product_attention(x, x, x),
    "LSTM without dropout": lambda x: nn.LSTM(4, 4, 2)(x[0]),
    "without memory": lambda x: torch.empty(3, device="meta").random_(),
}


def activations() -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


def refusing() -> RandomState:
    state = RandomState(3)
    state.refuses_unfollowed = True
    return state


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_nothing_replaces_is_refused_with_its_line(name: str) -> None:
    draw, instead = REFUSED[name]
    with refusing(), pytest.raises(UsageError) as caught:
        draw(activations())
    assert str(caught.value).startswith("test_random_ops.py:")
    assert "lambda x" in str(caught.value)
    assert "draws from torch's own generator, so that every rank would draw numbers of its own" in str(caught.value)
    assert instead in str(caught.value)
    with refusing(), Float64Mode(), pytest.raises(UsageError, match="draws from torch's own generator"):
        draw(activations().double())  # also where a mode is asked, that is given the replacement
    draw(activations())
    with RandomState(3):  # as of a plan of one rank
        draw(activations())


@pytest.mark.parametrize("name", ALLOWED)
def test_what_does_not_depend_on_the_plan_is_torchs_own(name: str) -> None:
    with refusing():
        ALLOWED[name](activations())


def test_other_threads_draw_as_without_a_model() -> None:
    x, failures = activations(), []

    def draw_all() -> None:
        try:
            torch.manual_seed(0)
            found.extend([torch.dropout(x, 0.5, True), dropout(x, 0.5), F.dropout(x, 0.5), x.clone().random_()])
            found.extend([torch.rand(3), x.clone().normal_(), F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)])
            leaf = x.clone().requires_grad_()
            checkpoint(F.dropout, leaf, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
            found.append(leaf.grad)
        except UsageError as error:
            failures.append(error)

    found: list[torch.Tensor | None] = []
    draw_all()
    expected, found = found, []
    with RandomState(3):
        alone = [F.dropout(x, 0.5), torch.rand(3)]
    with refusing():
        first = F.dropout(x, 0.5)
        logger = threading.Thread(target=draw_all)
        logger.start()
        logger.join()
        beside = [first, torch.rand(3)]
    assert not failures
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, beside, alone))


class Noisy(nn.Module):
    """Draws by a method of a tensor, in a part that the user recomputes."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layer, self.recomputes = nn.Linear(4, 4), recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.drop, x, use_reentrant=False) if self.recomputes else self.drop(x)
        return y

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.layer(x))
        return y * torch.empty_like(y).bernoulli_(0.5) * torch.rand_like(y)


def recomputes_draws(comm: Communicator) -> None:
    gradients = []
    for recomputes in (False, True):
        optimizer = partial(torch.optim.SGD, lr=0.1)
        trainer = uni.parallelize(partial(Noisy, recomputes), "dp=2", loss=F.mse_loss, optimizer=optimizer, check="off")
        trainer.model(activations()).square().sum().backward()
        gradients.append(trainer.model.layer.weight.grad.clone())  # type: ignore[union-attr, operator]
        trainer.optimizer.step()
    assert torch.equal(*gradients)


def test_methods_draw_the_same_again_in_a_backward_of_the_users_own(pools: Pools) -> None:
    pools("gloo", 2).run(recomputes_draws)


# ---- under a plan ----------------------------------------------------------------------------------------------------


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(dropout(torch.relu(self.first(x)), 0.5, self.training))


def answers(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=g), torch.randint(4, (8,), generator=g)


def refused(comm: Communicator) -> None:
    options = {"loss": F.cross_entropy, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    torch.manual_seed(0)
    trainer = uni.parallelize(ByName, "dp=2", check="off", **options)
    with pytest.raises(UsageError, match=r"test_random_ops.py:\d+ \(return self.last\(dropout.*torch.dropout draws"):
        trainer.step(answers(0))
    with pytest.raises(UsageError, match=r"test_random_ops.py:\d+ .*torch.dropout draws"):
        verify_here(comm, Task(ByName, F.cross_entropy, options["optimizer"], answers), uni.Plan(dp=2), 1)
    comm.barrier()
    # What a step would give without the refusal: not the loss of one device, with equal seeds everywhere.
    x, y = answers(0)
    torch.manual_seed(1)
    one_device = float(F.cross_entropy(build(ByName, 0)(x), y))
    trainer = uni.parallelize(ByName, "dp=2", check="off", seed=0, **options)
    trainer.random.refuses_unfollowed = trainer.tries_samples = False
    torch.manual_seed(1)
    assert abs(float(trainer.step((x, y))) - one_device) > 1e-3


def test_a_result_that_would_depend_on_the_plan_is_a_refusal(pools: Pools) -> None:
    pools("gloo", 2).run(refused)
