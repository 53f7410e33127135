"""Tensors of every kind are compared as what they are: truth values and whole numbers exactly, complex ones whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.parallel.task import Task
from unisono.parallel.trainer import Trainer
from unisono.verify.compare import Verdict
from unisono.verify.verify import verify_here


class Rotated(nn.Module):
    """Complex weights and a complex table; a mask of truth values and a counter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3)
        self.head = nn.Linear(8, 12)
        self.register_buffer("turn", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mixed = (self.embedding(x).to(torch.complex64) * self.turn) @ self.weight
        hidden: torch.Tensor = self.head(mixed.real - mixed.imag)
        return hidden * self.mask.any(0)[:, None]


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 12, (4, 6), generator=generator), torch.randint(0, 12, (4, 6), generator=generator)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


TASK = Task(Rotated, loss, adam, batch)


def flip_the_mask(trainer: Trainer) -> None:
    trainer.model.get_buffer("mask")[0, 1] = True


def count_once_more(trainer: Trainer) -> None:
    trainer.model.get_buffer("calls").add_(1)


def turn_otherwise(trainer: Trainer) -> None:
    """The imaginary part alone."""
    turn = trainer.model.get_buffer("turn")
    turn.copy_(torch.complex(turn.real, 1.001 * turn.imag))


def conjugate_a_gradient(trainer: Trainer) -> None:
    backward = trainer.backward

    def conjugating(batch: Any) -> torch.Tensor:
        value = backward(batch)
        weight = dict(trainer.optimized())["weight"]
        assert weight.grad is not None
        weight.grad.copy_(weight.grad.conj().resolve_conj().clone())
        return value

    trainer.backward = conjugating  # type: ignore[method-assign,assignment]


def judged(comm: Communicator, plan: str, dtype: str, prepare: Callable[[Trainer], None] | None) -> Verdict:
    return verify_here(comm, TASK, uni.Plan.parse(plan), 2, dtype, prepare)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_equivalent(pools: Callable[[str, int], RankPool], plan: str, dtype: str) -> None:
    verdict = pools("gloo", 2).run(judged, plan, dtype, None)[0]
    assert verdict.equivalent, verdict
    assert {each.kind: each.compared for each in verdict.worst}["buffers"] == 3


@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [
        (flip_the_mask, "buffers", "mask"),
        (count_once_more, "buffers", "calls"),
        (turn_otherwise, "buffers", "turn"),
        (conjugate_a_gradient, "gradients", "weight"),
    ],
)
def test_a_difference_is_found(
    pools: Callable[[str, int], RankPool], fault: Callable[[Trainer], None], kind: str, name: str
) -> None:
    for dtype in ("float64", "float32"):
        verdict = pools("gloo", 2).run(judged, "dp=2", dtype, fault)[0]
        assert not verdict.equivalent
        assert next(each.name for each in verdict.worst if each.kind == kind).startswith(name), verdict
