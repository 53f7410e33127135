"""A prediction of a module that a plan has changed in place: it communicates, and one rank alone must not run it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator


def trained_twice(comm: Communicator, plan: str) -> list[str]:
    notes = []
    for _ in range(2):
        torch.manual_seed(0)
        samples = [(torch.randn(4), torch.randn(2)) for _ in range(16)]
        engine = uni.Engine(
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
            loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.AdamW(p),
            plan=plan,
        )
        engine.fit(samples, epochs=1, batch_size=8)
        notes.append(engine.predicted().note)
        assert comm.all_gather_object(comm.rank) == list(range(comm.size))  # nobody is an operation ahead
    return notes


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_module_that_its_plan_has_changed_is_not_run_by_one_rank(
    pools: Callable[[str, int], RankPool], plan: str
) -> None:
    for notes in pools("gloo", 2).run(trained_twice, plan):
        for note in notes:
            assert "pass a function that builds the model" in note, notes
