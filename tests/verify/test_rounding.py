"""A bias before BatchNorm has no gradient but rounding, which Adam moves it by, and BatchNorm's running mean with it:
verify tells that from faults in buffers and updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.plan.plan import Plan
from unisono.verify.on_mesh import OnMesh
from unisono.verify.task import Task
from unisono.verify.verdict import Verdict
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]


def cancelled() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


TASK = Task(
    model=cancelled, loss=F.cross_entropy, optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-15), batch=batch
)


def forgetful(trainer: Any) -> None:
    trainer.model[1].momentum *= 1 + 1e-6


def hasty(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 1 + 1e-6


def prove(comm: Communicator) -> list[Verdict]:
    sound = [verify_here(comm, TASK, subject, 4) for subject in (Plan(dp=2), OnMesh.parse("dp=2"))]
    faults = ((forgetful, 4), (hasty, 1))  # after one step nothing but the update is off
    return [*sound, *(verify_here(comm, TASK, Plan(dp=2), steps, prepare=fault) for fault, steps in faults)]


def test_rounding_that_adam_blows_up_is_no_fault_and_hides_none(pools: Pools) -> None:
    plan, program, forgotten, moved = pools("gloo", 2).run(prove)[0]
    for verdict in (plan, program):
        assert verdict.equivalent, verdict
        assert {each.kind: each.deviation for each in verdict.worst}["buffers"] < 1e-12
    assert not forgotten.equivalent
    assert not moved.equivalent
