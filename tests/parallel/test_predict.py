"""predict and evaluate under every kind of plan: outputs of the full batch in its order, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.deferred_init.seeded_init import build
from unisono.parallel.apply import parallelize
from unisono.parallel.inputs import call
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan
from unisono.verify.training_record import batch_of

Pools = Callable[[str, int], RankPool]
CASES = [
    ("gpt", "dp=1"),
    ("gpt", "dp=2,zero=3"),
    ("gpt", "dp=2,microbatches=3"),
    ("gpt", "tp=2,sp"),
    ("gpt", "cp=2"),
    ("gpt", "cp=2,context=ulysses"),
    ("gpt", "pp=2,microbatches=4"),
    ("gpt", "pp=2,microbatches=4,schedule=zbv,chunks=2"),
    ("gpt", "dp=2,pp=2,microbatches=4,zero=3,schedule=interleaved,chunks=2"),
    ("gpt", "cp=2,pp=2,microbatches=2"),
    ("moe", "dp=2,ep=2"),
    ("conv", "dp=4"),
]


def trainer_of(task: Any, plan: str) -> Trainer:
    return parallelize(
        task.model,
        plan,
        loss=task.loss,
        optimizer=task.optimizer,
        example=batch_of(task, 0, torch.float64),
        rules=task.rules,
        dtype=torch.float64,
    )


def predicted(comm: Communicator, name: str, plan: str) -> None:
    task = getattr(tasks, name)
    trainer = trainer_of(task, plan)
    plain = build(task.model, 0).double().eval()
    inputs, targets = batch_of(task, 5, torch.float64)
    with torch.no_grad():
        expected = call(plain, inputs)
        loss = task.loss(expected, targets)
    for _ in range(2):  # the second time, pipelines know their messages
        outputs = trainer.predict(inputs)
        for mine, theirs in zip(tree_flatten(outputs)[0], tree_flatten(expected)[0], strict=True):
            assert not mine.requires_grad
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(trainer.evaluate((inputs, targets)), loss, rtol=1e-9, atol=0)
    assert all(module.training for module in trainer.model.modules())
    assert torch.isfinite(trainer.step((inputs, targets)))  # and training goes on
    assert trainer.steps == 1


@pytest.mark.parametrize(("task", "plan"), CASES)
def test_outputs_are_those_of_one_device(pools: Pools, task: str, plan: str) -> None:
    pools("gloo", Plan.parse(plan).world).run(predicted, task, plan)


class Odd(nn.Module):
    """Gives what has no samples, or cannot be sharded."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        odd = {"sum": y.sum(), "object": object(), "number": 7, "flipped": y.t(), "similarity": y @ y.t()}
        return {"rows": y, "odd": odd[self.kind]}


def odd_outputs(comm: Communicator) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for kind, words in (("sum", "is made of all samples"), ("object", "is a object"), ("similarity", "made of all")):
        trainer = parallelize(
            lambda kind=kind: Odd(kind), "dp=2", loss=lambda y, _: y["rows"].sum(), optimizer=torch.optim.SGD
        )
        with pytest.raises(UsageError, match=words):
            trainer.predict(x)
        comm.barrier()
    trainer = parallelize(lambda: Odd("flipped"), "dp=2", loss=lambda y, _: y["rows"].sum(), optimizer=torch.optim.SGD)
    assert trainer.predict(x)["odd"].shape == (2, 5)
    trainer = parallelize(lambda: Odd("number"), "dp=2", loss=lambda y, _: y["rows"].sum(), optimizer=torch.optim.SGD)
    outputs = trainer.predict(x)
    assert outputs["odd"] == 7
    assert outputs["rows"].shape == (5, 2)
    assert trainer.predict(x[:1])["rows"].shape == (1, 2)  # the other rank has no sample


def test_what_cannot_be_joined_is_refused(pools: Pools) -> None:
    pools("gloo", 2).run(odd_outputs)


class Compares(nn.Module):
    """Returns similarities of samples: in evaluation mode only, or always, as the second of two outputs."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.linear, self.always = nn.Linear(3, 2), always

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        if self.always:
            return y, y @ y.t()
        return y if self.training else y @ y.t()


def similarities(comm: Communicator, plan: str) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def trainer(always: bool, loss: Any) -> Trainer:
        return parallelize(lambda: Compares(always), plan, loss=loss, optimizer=torch.optim.SGD, example=(x, x[:, :2]))

    trained = trainer(False, nn.functional.mse_loss)
    assert torch.isfinite(trained.step((x, x[:, :2])))
    with pytest.raises(UsageError, match="made of all samples"):
        trained.predict(x)
    comm.barrier()
    with pytest.raises(UsageError, match="compares samples with each other"):
        trainer(True, lambda out, y: (out[0] - y).pow(2).mean() + out[1].pow(2).mean())
    comm.barrier()
    trained = trainer(True, lambda out, y: (out[0] - y).pow(2).mean())
    assert torch.isfinite(trained.step((x, x[:, :2])))
    with pytest.raises(UsageError, match="made of all samples"):
        trained.predict(x)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2,microbatches=2"])
def test_outputs_of_samples_by_samples_are_refused(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(similarities, plan)


def mixes_in_evaluation(comm: Communicator) -> None:
    """Complex values count too."""

    class Centres(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if self.training else torch.complex(y, y - y.mean(0))

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    trainer = parallelize(lambda: Centres(3, 2), "dp=2", loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
    with pytest.raises(UsageError, match="depend on the other samples"):
        trainer.predict(x)


def test_predictions_that_mix_samples_are_refused(pools: Pools) -> None:
    pools("gloo", 2).run(mixes_in_evaluation)
