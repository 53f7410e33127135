"""Plans that come to no verdict: all ranks end alike, in a sentence that says why, and soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from unisono.cli import main
from unisono.errors import UsageError
from unisono.parallel.task import Task
from unisono.verify import verify as verifying
from unisono.verify.verify import verify, verify_all


class Part(nn.Module):
    """Does something in a real forward, not in one without data."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            self.act()
        return x


def task_with(act: Callable[[], object]) -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Sequential(Part(act), nn.Tanh()), nn.Linear(8, 4))

    return Task(model, F.cross_entropy, sgd, batch)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def fail() -> None:
    raise IndexError("there is no\nsuch thing")


def on_ranks(act: Callable[[], object], *ranks: int) -> Callable[[], None]:
    def choose() -> None:
        if uni.is_initialized() and uni.rank() in ranks:
            act()

    return choose


def refuse() -> None:
    raise UsageError("this layer wants more of it; give it more")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(1000)


FAILURES = {
    "an error on one device": (fail, "the task fails on one device, without any plan: IndexError: there is no such"),
    "an error on all ranks": (on_ranks(fail, 0, 1), "IndexError: there is no such thing, in 1.0 (Part), at "),
    "an error on one rank": (on_ranks(fail, 1), "test_run_errors.py"),
    "a rank that is killed": (on_ranks(die, 1), "rank 1 was killed by SIGKILL"),
    "a rank that does not come": (on_ranks(sleep, 1), "has not entered any collective"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_reported_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "all ranks" not in name:  # else it is how long a slow machine's ranks may fail apart
        monkeypatch.setattr(verifying, "_TOGETHER", 1.0)
    act, reported = FAILURES[name]
    verdict = verify(task_with(act), "dp=2", steps=1, timeout=5 if "not come" in name else 60)
    assert not verdict.equivalent
    assert not verdict.refusal, verdict
    assert reported in verdict.failure, verdict
    assert "\n" not in verdict.failure
    assert ("(on rank 1 of 2)" in verdict.failure) == (name == "an error on one rank"), verdict


def optimizer_of_rank_0(parameters: Any) -> torch.optim.Optimizer:
    if uni.rank():
        raise KeyError("no such\noptimizer")
    return sgd(parameters)


def test_an_error_while_the_plan_is_applied() -> None:
    verdict = verify(replace(task_with(lambda: None), optimizer=optimizer_of_rank_0), "dp=2", steps=1)
    assert not verdict.refusal
    assert verdict.failure.startswith("rank 1 failed while the plan was applied: KeyError: "), verdict
    assert "\n" not in verdict.failure


@pytest.mark.parametrize(
    ("ranks", "plan"), [((1,), "dp=2,zero=3"), ((0, 1), "dp=2"), ((1,), "dp=2"), ((0, 1), "dp=2,zero=3")]
)
def test_a_refusal_in_the_middle_of_a_step(plan: str, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_TOGETHER", 1.0)
    verdict = verify(task_with(on_ranks(refuse, *ranks)), plan, steps=1)
    assert verdict.refusal == "this layer wants more of it; give it more", verdict
    assert not verdict.failure


def test_plans_after_one_that_failed_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_TOGETHER", 1.0)
    plans = [uni.Plan(dp=2), uni.Plan(dp=2, zero=1), uni.Plan(dp=2, microbatches=2)]
    seen: list[str] = []
    verdicts = verify_all(
        task_with(on_ranks(fail, 1)), plans, steps=1, on_verdict=lambda each: seen.append(each.plan), timeout=60
    )
    assert seen == [str(plan) for plan in plans]
    assert all("IndexError: there is no such thing" in each.failure for each in verdicts), verdicts


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{__file__}:failing", "--plan", "dp=2", "--steps", "1"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("plan dp=2 failed: the task fails on one device, without any plan: IndexError"), shown


failing = task_with(fail)
