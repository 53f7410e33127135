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
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.verify.compare import Verdict
from unisono.verify.mesh_program import ProgramSpec
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
    sound = [verify_here(comm, TASK, subject, 4) for subject in (Plan(dp=2), ProgramSpec.parse("dp=2"))]
    faults = ((forgetful, 4), (hasty, 1))  # after one step nothing but the update is off
    return [*sound, *(verify_here(comm, TASK, Plan(dp=2), steps, prepare=fault) for fault, steps in faults)]


def test_rounding_that_adam_blows_up_is_no_fault_and_hides_none(pools: Pools) -> None:
    plan, program, forgotten, moved = pools("gloo", 2).run(prove)[0]
    for verdict in (plan, program):
        assert verdict.equivalent, verdict
        assert {each.kind: each.deviation for each in verdict.worst}["buffers"] < 1e-12
    assert not forgotten.equivalent
    assert not moved.equivalent


class Sensitive(torch.optim.Optimizer):
    """In its first step moves parameters by the digits of their gradients from the tenth on: rounding grows to 1e-8."""

    def __init__(self, parameters: Any, factor: float) -> None:
        super().__init__(parameters, {"factor": factor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 0.1 * (parameter.grad + (group["factor"] * parameter.grad).sin())
            group["factor"] = 1.0


def few(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 16, generator=generator), torch.randint(4, (3,), generator=generator)


def scaled(trainer: Any) -> None:
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: gradient * (1 + 3e-8))


def scaled_later(trainer: Any) -> None:
    """From the second step on."""
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: gradient * (1.5 if trainer.steps else 1.0))


def prove_sensitive(comm: Communicator) -> list[Verdict]:
    def task(factor: float) -> Task:
        return Task(lambda: nn.Linear(16, 4), F.cross_entropy, lambda p: Sensitive(p, factor), few)

    faults = ((1.0, scaled), (1e3, scaled), (3e13, scaled), (3e13, scaled_later))
    sound = [verify_here(comm, task(factor), Plan(dp=2), 2) for factor in (1e9, 3e13)]
    return [*sound, *(verify_here(comm, task(factor), Plan(dp=2), 2, prepare=fault) for factor, fault in faults)]


def test_rounding_that_grows_on_one_device_too_is_no_fault_and_hides_none(pools: Pools) -> None:
    little, much, *faulty = pools("gloo", 2).run(prove_sensitive)[0]
    for sound in (little, much):
        assert sound.equivalent, sound
        assert "rounding alone moves this job on one device" in sound.note
    assert max(each.deviation for each in little.worst) < 1e-4 < max(each.deviation for each in much.worst)
    assert [verdict.equivalent for verdict in faulty] == [False] * 4


class Centred(nn.Module):
    """Keeps a running mean of what a norm has centred: nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.head = (
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            nn.LayerNorm(16, elementwise_affine=False),
            nn.Linear(16, 4),
        )
        self.register_buffer("running", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.down(self.up(x).tanh()))
        with torch.no_grad():
            self.running.lerp_(x.mean(), 0.1)  # type: ignore[operator]
        return self.head(x)


def prove_centred(comm: Communicator) -> Verdict:
    task = Task(Centred, F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), batch, {"up": "column", "down": "row"})
    return verify_here(comm, task, Plan(tp=2), 2)


def test_a_buffer_of_nothing_but_rounding_is_no_fault(pools: Pools) -> None:
    verdict = pools("gloo", 2).run(prove_centred)[0]
    assert verdict.equivalent, verdict
