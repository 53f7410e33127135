"""A plan that cannot be right is refused with the reason; one that can gives an ordinary trainer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt import GPT, Config
from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.apply import parallelize
from unisono.parallel.checks.preview import require_fitting_loss

REFUSALS = [
    (2, "mlp", "dp=3", {}, "needs 3 ranks .* but 2 are running; use dp=2 or start 3"),
    (2, "mlp", "dp=2,qp=1", {}, "unknown key 'qp'"),
    (2, "conv", "dp=2,microbatches=2", {}, "BatchNorm takes its statistics over the full batch"),
    (2, "mlp", "pp=2,microbatches=4", {"example": None}, "needs an example batch"),
    (2, "conv", "pp=2,microbatches=2", {}, "BatchNorm takes its statistics over the full batch"),
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
    if task == "llama_like":
        pytest.importorskip("transformers")
    for reported in pools("gloo", size).run(refused, task, plan, changes):
        assert re.search(words, reported), reported


def _three_heads() -> nn.Module:
    return GPT(Config(vocabulary=32, context=16, width=12, heads=3, layers=4))


def _first_row_only(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(outputs[0], targets)


def _loss_of_a_dict(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, targets)


def _a_vector(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _lstm() -> nn.Module:
    return nn.Sequential(nn.LSTM(12, 5, num_layers=2, dropout=0.1))


def _instance_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 5), nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True))


def _spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(12, 5)))


BEFORE_COMMUNICATION: list[tuple[str, str, dict[str, Any], str]] = [
    ("mlp", "dp=2,tp=2", {}, r"needs 4 ranks \(dp=2·tp=2\), but 2 are running"),
    ("mlp", "pp=2,microbatches=4,schedule=interleaved,chunks=3", {}, "has only 4 blocks to share out"),
    ("gpt", "tp=2", {"model": _three_heads}, "attention.* has heads=3, which tp=2 does not divide"),
    ("mlp", "pp=2,microbatches=4,schedule=naive", {}, "naive schedule .* takes microbatches=1, not 4"),
    ("mlp", "dp=2,turbo", {}, "unknown key 'turbo'; known are dp, tp"),
    ("mlp", "dp=2", {"loss": _first_row_only}, r"cannot take what the model returns, float32\[2, 5\]"),
    ("mlp", "tp=2", {"loss": _loss_of_a_dict}, "has no attribute 'logits'"),
    ("mlp", "pp=2,microbatches=2", {"loss": _a_vector}, "expected one number in a tensor"),
    ("conv", "dp=2", {"loss": _loss_of_a_dict}, "has no attribute 'logits'"),
    ("mlp", "pp=2,microbatches=99", {}, "the example has .* expected at least 99"),
    ("mlp", "tp=2", {"model": _lstm}, r"0 \(LSTM\) draws from torch's own generator"),
    ("mlp", "dp=2", {"model": _instance_norm}, r"2 \(InstanceNorm1d\) tracks running statistics"),
    ("mlp", "dp=2,microbatches=2", {"model": _spectral_norm}, r"\(_SpectralNorm\) has a spectral norm that goes on"),
]


def refused_alone(comm: Communicator, name: str, plan: str, changes: dict[str, Any]) -> str:
    """Only one rank asks: if it had to communicate before it refuses, it would wait for the other for ever."""
    if comm.rank != 0:
        return ""
    task = dataclasses.replace(getattr(tasks, name), **changes)
    with pytest.raises(UsageError) as caught:
        parallelize(task.model, plan, loss=task.loss, optimizer=task.optimizer, example=task.batch(0), rules=task.rules)
    return str(caught.value)


@pytest.mark.parametrize(("task", "plan", "changes", "words"), BEFORE_COMMUNICATION)
def test_bad_input_is_refused_before_any_rank_communicates(
    pools: Callable[[str, int], RankPool], task: str, plan: str, changes: dict[str, Any], words: str
) -> None:
    reported = pools("gloo", 2).run(refused_alone, task, plan, changes)[0]
    assert re.search(words, reported), reported


def refused_by_one(comm: Communicator, plan: str) -> str:
    """Rank 1 has a reason that the others know nothing of."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if comm.rank == 1:
            raise UsageError("rank 1 will not")
        return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(UsageError) as caught:
        parallelize(tasks.mlp.model, plan, loss=tasks.mlp.loss, optimizer=optimizer, example=tasks.mlp.batch(0))
    comm.barrier()
    return str(caught.value)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2", "dp=2,zero=3"])
def test_what_one_rank_refuses_all_refuse(pools: Callable[[str, int], RankPool], plan: str) -> None:
    assert pools("gloo", 2).run(refused_by_one, plan) == ["rank 1 will not"] * 2


class CountsItsHeads(nn.Module):
    """Takes what is left for the width of a head: half of the columns fit as well, and mean something else."""

    def __init__(self, with_products: bool) -> None:
        super().__init__()
        self.count, self.with_products = 4, with_products
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.count, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.with_products:
            mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(-2))


SHARDED = {"0.[qkv]": "column", "0.out": "row"}


def split_heads(comm: Communicator, with_products: bool) -> str:
    x = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(1))
    reported = ""
    for rules in ({**SHARDED, "0": "heads:count"}, SHARDED):
        trainer = parallelize(
            lambda: nn.Sequential(CountsItsHeads(with_products)),
            "tp=2",
            loss=F.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            rules=rules,
        )
        try:
            trainer.step((x, x))
        except UsageError as error:
            reported += str(error)
        else:
            reported += "trains; "
    return reported


@pytest.mark.parametrize("with_products", [False, True])
def test_tp_does_not_split_through_heads(pools: Callable[[str, int], RankPool], with_products: bool) -> None:
    reported = pools("gloo", 2).run(split_heads, with_products)
    words = r"trains; tp=2: CountsItsHeads computes attention over 4 features of a head; in the full model it is .*8"
    assert all(re.match(words, each) for each in reported), reported


class Remembering(nn.Module):
    """Keeps a table of its first run, and needs values: a look ahead must leave no trace in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.linear = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(12, device=x.device)
        return self.linear(x * self.table)


def test_a_look_ahead_leaves_no_trace() -> None:
    model = Remembering()
    require_fitting_loss(model, F.cross_entropy, tasks.mlp.batch(0))
    assert model.table is None
    with pytest.raises(UsageError, match="cannot take what the model returns"):
        require_fitting_loss(model, _first_row_only, tasks.mlp.batch(0))
    with pytest.raises(UsageError, match=r"expected a batch: \(inputs, targets\)"):
        require_fitting_loss(model, F.cross_entropy, tasks.mlp.batch(0)[0])  # type: ignore[arg-type]


def test_a_loss_that_needs_values_is_not_refused() -> None:
    def in_python(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets) if float(outputs.sum()) < 1e9 else outputs.sum()

    require_fitting_loss(nn.Linear(12, 5), in_python, tasks.mlp.batch(0))


def a_loss_that_cannot_take_it(comm: Communicator) -> str:
    task = tasks.mlp
    trainer = parallelize(
        task.model, "dp=2", loss=lambda outputs, targets: F.nll_loss(outputs[0], targets), optimizer=task.optimizer
    )
    with pytest.raises(UsageError) as caught:
        trainer.step(task.batch(0))
    return str(caught.value)


def test_a_loss_that_cannot_take_what_the_model_returns(pools: Callable[[str, int], RankPool]) -> None:
    for reported in pools("gloo", 2).run(a_loss_that_cannot_take_it):
        assert "cannot take what the model returns" in reported


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
