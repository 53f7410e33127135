"""torch's own draws in a model that runs: the part of a batch draws what the whole does, others are left to torch."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unisono.mesh.random.random_functions import draws_decomposed
from unisono.mesh.random.state import RandomState

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "rand of sizes": lambda x: torch.rand(*x.shape, dtype=torch.float16),
    "randn by size": lambda x: torch.randn(size=x.shape),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of p": lambda x: x.bernoulli(0.3),
    "bernoulli_": lambda x: x.new_empty(len(x), 1).bernoulli_(0.5),
    "bernoulli_ of numbers": lambda x: torch.empty(len(x), 3, dtype=torch.int64).bernoulli_(x.sigmoid()),
    "uniform_": lambda x: x.clone().uniform_(-2, to=3),
    "normal_": lambda x: x.clone().normal_(5, std=0.1),
    "exponential_": lambda x: x.clone().exponential_(2),
    "normal": lambda x: torch.normal(x, 0.1) + torch.normal(0, x.exp()) + torch.normal(0.0, 1.0, x.shape),
    "randint": lambda x: torch.randint(7, x.shape) + torch.randint(2, 9, size=x.shape),
    "randint by name": lambda x: torch.randint(low=1, high=3, size=x.shape) + torch.randint(high=3, size=x.shape),
    "randint_like": lambda x: torch.randint_like(x, 5) + torch.randint_like(x, 2, 4),
    "multinomial": lambda x: torch.multinomial(x.exp(), 2) + x.exp().multinomial(2, replacement=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_half_of_a_batch_draws_half_of_the_numbers(name: str) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    with RandomState(3):
        full = DRAWS[name](x)
    state = RandomState(3)
    with state, state.sharded(0, range(4, 8), of=8):
        half = DRAWS[name](x[4:])
    assert half.dtype == full.dtype == DRAWS[name](x).dtype
    assert torch.equal(half, full[4:])
    assert full.unique().numel() > 1


def test_what_has_no_samples_is_the_same_on_every_rank() -> None:
    weight, state = nn.Parameter(torch.zeros(4, 3)), RandomState(3)
    with RandomState(3):
        expected = torch.randn_like(weight), torch.rand(5), torch.rand([]), torch.randperm(7)
    with state, state.sharded(0, range(4, 8), of=8):
        found = torch.randn_like(weight), torch.rand(5), torch.rand([]), torch.randperm(7)
    assert all(map(torch.equal, found, expected))
    assert sorted(expected[3].tolist()) == list(range(7))


def test_numbers_are_spread_as_they_should_be() -> None:
    with RandomState(1):
        many = torch.zeros(20_000)
        assert many.clone().normal_(3, 2).std().item() == pytest.approx(2, rel=0.03)
        assert many.clone().exponential_(4).mean().item() == pytest.approx(0.25, rel=0.03)
        assert torch.randint(2, 5, (20_000,)).double().mean().item() == pytest.approx(3, rel=0.02)
        chosen = torch.multinomial(torch.tensor([0.0, 1.0, 3.0]), 20_000, replacement=True)
        assert torch.bincount(chosen, minlength=3).tolist() == pytest.approx([0, 5000, 15_000], rel=0.05)
        assert sorted(torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), 2).tolist()) == [0, 2]
        assert many.clone().bernoulli_(0.3).mean().item() == pytest.approx(0.3, rel=0.05)


def test_other_threads_and_generators_draw_as_ever() -> None:
    def drawn(generator: torch.Generator | None = None) -> list[torch.Tensor]:
        return [torch.rand(3, generator=generator), torch.randperm(5, generator=generator), torch.zeros(3).normal_()]

    torch.manual_seed(0)
    expected, found = drawn(), []
    with RandomState(3):
        torch.manual_seed(0)
        loader = threading.Thread(target=lambda: found.extend(drawn()))
        loader.start()
        loader.join()
        own = drawn(torch.Generator().manual_seed(0))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, own[:2], expected[:2]))
    assert not torch.equal(own[2], expected[2])
    with RandomState(3):
        with draws_decomposed():  # as where a model is traced in the midst of a step
            torch.manual_seed(0)
            assert torch.equal(torch.rand(3), expected[0])
        assert not torch.equal(torch.rand(3), expected[0])
    torch.manual_seed(0)
    assert all(map(torch.equal, drawn(), expected))
