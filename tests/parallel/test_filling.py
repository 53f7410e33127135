"""A model that a function builds: ranks hold its initial values bit for bit, and no rank ever has more than its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.initial import build
from unisono.parallel.apply import parallelize
from unisono.parallel.layout import layout_of, local_of
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan

WIDTH, HIDDEN, BLOCKS = 512, 2048, 10
LARGEST = WIDTH * HIDDEN * 4
WHOLE = 2 * BLOCKS * LARGEST
MIB = 2**20


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


def big(hidden: int = HIDDEN) -> nn.Module:
    model = nn.Sequential(*(Block(hidden) for _ in range(BLOCKS)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def _status(key: str) -> int:
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(key)
    )


def _trained(make: Any, plan: str, loss: Any, targets: torch.Tensor | None = None) -> Trainer:
    return parallelize(
        make,
        plan,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        example=(torch.zeros(4, WIDTH), torch.zeros(4, WIDTH) if targets is None else targets),
        rules={"*.up": "column", "*.down": "row"},
    )


def peak_of_building(comm: Communicator, plan: str) -> tuple[int, int, str]:
    """The most memory that building took, what is held afterwards, in bytes, and why it was built whole."""
    _trained(lambda: big(2), plan, F.mse_loss)  # what is imported and kept for all models
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is used now
    trainer = _trained(big, plan, F.mse_loss)
    peak = _status("VmHWM") - before
    held = sum(parameter.untyped_storage().nbytes() for parameter in trainer.model.parameters())
    return peak, held, trainer.note


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2", "dp=2,zero=3"])
def test_a_rank_never_has_more_than_its_own_and_a_tensor_more(pools: Callable[[str, int], RankPool], plan: str) -> None:
    for peak, held, note in pools("gloo", 2).run(peak_of_building, plan):
        assert not note
        assert held == WHOLE / 2
        assert peak < WHOLE / 2 + 2 * LARGEST + 12 * MIB < WHOLE


def differing(comm: Communicator, name: str, plan: str) -> tuple[list[str], str]:
    """The parameters and buffers here that are not a part of what one process has, and why it was built whole."""
    task = getattr(tasks, name)
    trainer = parallelize(
        task.model,
        plan,
        loss=task.loss,
        optimizer=task.optimizer,
        example=task.batch(0),
        rules=task.rules,
        seed=5,
    )
    whole = build(task.model, 5)
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    held = {**dict(trainer.model.named_buffers()), **dict(trainer.optimized())}
    wrong = [
        key
        for key, tensor in held.items()
        if not torch.equal(tensor, local_of(expected[key], layout_of(tensor), trainer.mesh))
    ]
    trainer.step(task.batch(0))
    return wrong, trainer.note


PLANS = [
    ("mlp", "tp=2"),
    ("gpt", "tp=2,pp=2,microbatches=2"),
    ("gpt", "dp=2,pp=2,microbatches=2,zero=3"),
    ("gpt", "dp=2,tp=2,sp,zero=3"),
    ("moe", "dp=2,ep=2,tp=2"),
    ("conv", "dp=4,zero=3"),
]
if importlib.util.find_spec("transformers"):
    PLANS += [("llama", "dp=2,tp=2,zero=3"), ("llama", "pp=2,tp=2,microbatches=2")]


@pytest.mark.parametrize(("task", "plan"), PLANS)
def test_values_are_those_of_one_process(pools: Callable[[str, int], RankPool], task: str, plan: str) -> None:
    for wrong, note in pools("gloo", Plan.parse(plan).world).run(differing, task, plan):
        assert not wrong
        assert not note


def mistakes(comm: Communicator) -> list[str]:
    """What is refused before training, of a model that is not there yet."""
    told = []
    for loss, targets in (
        (lambda outputs, targets: outputs, None),
        (F.cross_entropy, torch.zeros(4, 3, dtype=torch.long)),
    ):
        try:
            _trained(lambda: big(2), "tp=2", loss, targets)
        except UsageError as error:
            told.append(str(error))
    return told


def test_a_loss_that_does_not_fit_is_refused_all_the_same(pools: Callable[[str, int], RankPool]) -> None:
    for told in pools("gloo", 2).run(mistakes):
        assert "expected one number" in told[0]
        assert "cross_entropy" in told[1]


def with_numbers(comm: Communicator) -> Any:
    task = tasks.moe
    trainer = parallelize(
        task.model,
        "pp=2,microbatches=2",
        loss=task.loss,
        optimizer=task.optimizer,
        example=task.batch(0),
        rules=task.rules,
    )
    return trainer.note


def test_a_pipeline_of_a_model_that_needs_numbers_is_built_whole(pools: Callable[[str, int], RankPool]) -> None:
    for note in pools("gloo", 2).run(with_numbers):
        assert "without numbers" in note
