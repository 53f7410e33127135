"""A plan that cannot be right is refused with the reason; one that can gives an ordinary trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.apply import parallelize

REFUSALS = [
    (2, "mlp", "dp=3", {}, "needs 3 ranks .* but 2 are running; use dp=2 or start 3"),
    (2, "mlp", "dp=2,qp=1", {}, "unknown key 'qp'"),
    (2, "conv", "dp=2,microbatches=2", {}, "BatchNorm takes its statistics over the whole batch"),
    (2, "mlp", "pp=2,microbatches=4", {"example": None}, "needs an example batch"),
    (2, "conv", "pp=2,microbatches=1", {}, "BatchNorm|blocks|stage"),
    (2, "mlp", "dp=2,schedule=zb1p", {}, "but pp=1; leave it out"),
    (2, "mlp", "pp=2,microbatches=4,schedule=naive", {}, "naive"),
    (2, "mlp", "dp=2,ep=2", {}, "has no uni.nn.MoE"),
    (4, "llama_like", "tp=4", {}, "head"),
    (2, "mlp", "tp=2", {"rules": {"blocks.*.fc9": "column"}}, "fc9"),
    (2, "mlp", "cp=2", {}, "hidden states|sequence|attention|tokens"),
]


def refused(comm: Communicator, name: str, plan: str, changes: dict[str, Any]) -> str:
    task = tasks.llama if name == "llama_like" else getattr(tasks, name)
    options: dict[str, Any] = {"example": task.batch(0), "rules": task.rules} | changes

    def train() -> None:
        trainer = parallelize(task.model, plan, loss=task.loss, optimizer=task.optimizer, **options)
        trainer.step(task.batch(0))

    with pytest.raises(UsageError) as caught:
        train()
    comm.barrier()
    return str(caught.value)


@pytest.mark.parametrize(("size", "task", "plan", "changes", "words"), REFUSALS)
def test_what_cannot_be_right_is_refused(
    pools: Callable[[str, int], RankPool], size: int, task: str, plan: str, changes: dict[str, Any], words: str
) -> None:
    import re

    if task == "llama_like":
        pytest.importorskip("transformers")
    for told in pools("gloo", size).run(refused, task, plan, changes):
        assert re.search(words, told), told


def a_loss_that_cannot_take_it(comm: Communicator) -> str:
    task = tasks.mlp
    trainer = parallelize(
        task.model, "dp=2", loss=lambda outputs, targets: F.nll_loss(outputs[0], targets), optimizer=task.optimizer
    )
    with pytest.raises(UsageError) as caught:
        trainer.step(task.batch(0))
    return str(caught.value)


def test_a_loss_that_cannot_take_what_the_model_returns(pools: Callable[[str, int], RankPool]) -> None:
    for told in pools("gloo", 2).run(a_loss_that_cannot_take_it):
        assert "cannot take what the model returns" in told


def an_ordinary_loop(comm: Communicator) -> list[float]:
    task = tasks.mlp
    trainer = parallelize(task.model, "dp=2", loss=task.loss, optimizer=task.optimizer, clip=task.clip)
    losses = [float(trainer.step(task.batch(0))) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert trainer.norm is not None
    evaluated = float(trainer.evaluate(task.batch(0)))
    assert trainer.model.training
    assert evaluated < losses[0]
    with torch.no_grad():
        assert trainer.model(task.batch(0)[0]).shape == (13, 5)  # with pp=1 an ordinary module
    return losses


def test_training_goes_on_alike_on_all_ranks(pools: Callable[[str, int], RankPool]) -> None:
    one, other = pools("gloo", 2).run(an_ordinary_loop)
    assert one == other
