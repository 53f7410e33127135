"""A step on a GPU waits for nothing that the GPU has been given to do; what was counted is heard of all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.loss.counts import PendingCounts, PredictedCounts
from unisono.parallel.task import Task
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import AXES, Plan
from unisono.simulate.rank import build_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, ignore_index=-1)


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ranks have the same, for the one that is there brings its own instead of the other's."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(32, 16, generator=drawn).repeat(2, 1), torch.randint(-1, 8, (32,), generator=drawn).repeat(2)


@pytest.fixture(params=["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """One rank of two, whose other is not there."""
    device, plan = torch.device("cuda"), Plan.parse(request.param)
    task = Task(lambda: nn.Linear(16, 8), _loss, lambda parameters: torch.optim.AdamW(parameters), _batch)
    with world.simulated(0, 2):
        mesh = Mesh(plan.shape, AXES)
        mesh.connect()
        given = tuple(leaf.to(device) for leaf in _batch(0))
        made = build_trainer(task, plan, mesh, (given[0], given[1]), device)
        made.given = given  # type: ignore[attr-defined]
        yield made


def test_a_step_waits_for_nothing(trainer: Trainer) -> None:
    given = trainer.given  # type: ignore[attr-defined]
    for _ in range(3):
        trainer.step(given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.loss._predicts, "ranks asked each other: what they do without is not what was tried"


def test_what_was_predicted_wrongly_is_reported_before_anything_is_saved(trainer: Trainer) -> None:
    loss = trainer.loss
    wrong = PredictedCounts([torch.tensor(60, device="cuda")])
    for reported, is_right in ((60.0, True), (58.0, False)):
        loss._predicts = True
        loss._reported = PendingCounts(torch.tensor([2.0, reported, 0.0], device="cuda", dtype=torch.float64), wrong)
        assert not loss._reported.is_here
        if is_right:
            trainer.state_dict()
        else:
            with pytest.raises(UsageError, match="count depends on the outputs"):
                trainer.state_dict()
