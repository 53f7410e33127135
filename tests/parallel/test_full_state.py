"""state_dict() of a model of which a rank has a part: refused, as what it would have is no model that one can load."""

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
from unisono.errors import UsageError


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def _refused(comm: Communicator, plan: str) -> dict[str, str]:
    """What the model and the optimizer say after a step, and whether the full state loads in a plain model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    batch = (torch.ones(4, 8), torch.zeros(4, 8))
    trainer = uni.parallelize(
        model, plan, loss=F.mse_loss, optimizer=lambda each: torch.optim.AdamW(each, lr=0.1), example=batch
    )
    trainer.step(batch)
    fresh = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain.load_state_dict(trainer.state_dict()["model"])
    return {
        "model": _message(model.state_dict),
        "load": _message(lambda: model.load_state_dict(plain.state_dict(), strict=False)),
        "optimizer": _message(trainer.optimizer.state_dict),
        "load optimizer": _message(lambda: trainer.optimizer.load_state_dict(fresh.state_dict())),
    }


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        ("dp=2", set()),
        ("dp=2,zero=1", {"optimizer", "load optimizer"}),
        ("dp=2,zero=3", {"model", "load", "optimizer", "load optimizer"}),
        ("tp=2", {"model", "load", "optimizer", "load optimizer"}),
        ("pp=2,microbatches=2", {"model", "optimizer", "load optimizer"}),
    ],
)
def test_what_a_rank_has_a_part_of_is_refused(
    pools: Callable[[str, int], RankPool], plan: str, refused: set[str]
) -> None:
    for messages in pools("gloo", 2).run(_refused, plan):
        assert {what for what, message in messages.items() if message} == refused
        for message in filter(None, messages.values()):
            assert message.startswith(f"plan {plan}: ")
            assert "trainer." in message


def test_the_shard_is_named(pools: Callable[[str, int], RankPool]) -> None:
    found = pools("gloo", 2).run(_refused, "tp=2")[0]
    assert "this rank's shard of 0.weight, (8, 8) of (16, 8)" in found["model"]
    assert "0.weight, (8, 8), and model.load_state_dict() was given (16, 8)" in found["load"]
