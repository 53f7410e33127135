"""Replays: a step's time from what ranks measured alone and what their messages take; plans that fail block no one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.parallel.task import Task
from unisono.plan.hardware.spec import Hardware, Link
from unisono.plan.hardware.toml import read_hardware
from unisono.plan.plan import Plan
from unisono.plan.schedules.schedule import schedule
from unisono.planner.auto import choose, prediction
from unisono.planner.choice import Choice, Job, Lap
from unisono.planner.measure.machine import HARDWARE
from unisono.planner.replay import Message, Prediction, RankReplay, message_seconds, replay, step_seconds

CPU = torch.device("cpu")


def _machine(**more: Any) -> Hardware:
    """Links of 1 ms and 1 MB/s: a message of a MB takes a second and a millisecond."""
    link = Link(1e6, 1e-3)
    return replace(read_hardware("h100"), intra_node=link, inter_node=link, **{"overlap": 0.0} | more)


def test_messages_take_what_links_take() -> None:
    machine = _machine()
    for op, size, seconds in (
        ("all_reduce", 10**6, 2 * (1e-3 + 0.5)),
        ("all_gather_into", 10**6, 1e-3 + 1.0),  # of half the result
        ("reduce_scatter", 10**6, 1e-3 + 0.5),
        ("all_to_all", 10**6, 1e-3 + 0.5),
    ):
        assert message_seconds(Message(op, (0, 1), size), machine) == pytest.approx(seconds), op
    assert message_seconds(Message("send", (0, 1), 10**6), machine) == pytest.approx(1e-3 + 1.0)


def test_the_slowest_rank_and_its_messages_make_the_step() -> None:
    gradients, activations = Message("all_reduce", (0, 1), 10**5), Message("all_reduce", (0, 2), 10**5)
    messages = Counter({gradients: 2, activations: 3})
    ranks = [RankReplay(Plan(dp=2, tp=2), seconds, messages, replicas=(0, 1)) for seconds in (0.5, 0.7, 0.6, 0.6)]
    each = 2 * (1e-3 + 0.05)
    assert step_seconds(ranks, _machine()) == pytest.approx(0.7 + 5 * each)
    hidden = step_seconds(ranks, _machine(overlap=1.0))  # replicas' messages travel during the backward
    assert hidden == pytest.approx(0.7 + 3 * each)
    gathered = Message("all_gather_into", (0, 1), 10**5)  # parameters, after the optimizer's step
    sharded = [replace(rank, plan=Plan(dp=2, tp=2, zero=1), messages=Counter({gathered: 1})) for rank in ranks]
    assert step_seconds(sharded, _machine(overlap=1.0)) == pytest.approx(0.7 + 1e-3 + 0.1)
    piped = [replace(rank, plan=Plan(dp=2, pp=2)) for rank in ranks]  # gradients leave when the pipeline has ended
    assert step_seconds(piped, _machine(overlap=1.0)) == pytest.approx(0.7 + 5 * each)


def test_a_pipeline_is_played_with_the_times_of_its_actions() -> None:
    """Two stages of 1 s forward and 2 s backward, four microbatches: 12 s of work, a bubble of 3, and 0.5 s outside."""
    order = schedule("1f1b", 2, 4)
    ranks = [
        RankReplay(
            Plan(pp=2, microbatches=4),
            12.5,
            Counter({Message("send", (stage, 1 - stage), 10**3): 4}),
            (),
            order,
            (0, 1),
            {("F", stage): 1.0, ("B", stage): 2.0},
        )
        for stage in range(2)
    ]
    still = replace(_machine(), intra_node=Link(1e30, 0.0))
    assert step_seconds(ranks, still) == pytest.approx(12 + 3 + 0.5)
    assert step_seconds(ranks, _machine()) > 15.5  # messages travel
    halves = [
        replace(rank, schedule=schedule("zb1p", 2, 4), actions={("F", s): 1.0, ("I", s): 1.0, ("W", s): 1.0})
        for s, rank in enumerate(ranks)
    ]
    assert 12.5 <= step_seconds(halves, still) < 15.5
    shared = replace(still, cores=1, devices_per_node=2)  # both ranks were timed while they took turns on a core
    assert step_seconds(ranks, shared) == pytest.approx(12.5)


class _Fails(nn.Module):
    """On the rank that has fewer than four samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 4 and not x.is_meta:
            raise RuntimeError("too few samples")
        return self.layers(x)


def _job(model: Any) -> Job:
    batch = (torch.ones(4, 8), torch.ones(4, 8))
    return Job(model, F.mse_loss, lambda p: torch.optim.AdamW(p, lr=1e-3), batch)


def _of_plans(comm: Any) -> tuple[list[Prediction], list[Prediction], list[Prediction]]:
    def three(model: Any) -> list[Prediction]:
        plans = [Plan(dp=2), Plan(tp=2), Plan(pp=2), Plan(dp=2, zero=3)]
        return replay(plans, _job(model), comm, CPU, read_hardware("h100"), {})

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    before = [p.detach().clone() for p in module.parameters()]
    given = three(module)
    assert all(map(torch.equal, module.parameters(), before))
    return given, three(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))), three(_Fails)


@pytest.mark.thorough
def test_plans_are_replayed_on_all_ranks(pools: Callable[[str, int], RankPool]) -> None:
    first, second = pools("gloo", 2).run(_of_plans)
    assert first == second
    given, built, failing = first
    for found in (given, built):
        assert all(each.seconds is not None and 0 < each.seconds < 60 for each in found), found
    assert [each.seconds is None for each in failing] == [
        True,
        False,
        True,
        True,
    ]  # it is no chain of layers for a pipeline
    assert failing[0].reason == "rank 0: too few samples"


def _chosen(comm: Any, task: Task) -> tuple[Choice, Choice, Choice]:
    job = Job(task.model, task.loss, task.optimizer, task.batch(0), task.rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HARDWARE, "tools/two_cores.toml")
        raced = choose(job, comm, CPU, {})
        modelled = choose(job, comm, CPU, {}, with_race=False)
        return raced, modelled, prediction(Plan(tp=2), job, comm, CPU, {})


@pytest.mark.thorough
def test_auto_finds_one_plan_on_all_ranks(pools: Callable[[str, int], RankPool]) -> None:
    first, second = pools("gloo", 2).run(_chosen, tasks.short)
    assert first == second
    raced, modelled, given = first
    assert raced.plan.world == modelled.plan.world == 2
    assert raced.race
    assert not modelled.race
    assert (given.seconds or 0) > 0
    measured = {lap.plan: lap.measured for lap in raced.race if lap.measured}
    shown = [reason for _, reason in raced.why if reason.endswith("(measured)")]
    assert all(reason.startswith("+") for reason in shown)  # no neighbour that raced was faster
    assert len({Plan.parse(plan).shape for plan in measured}) > 1  # the best of several meshes


def _alone(comm: Any) -> Choice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HARDWARE, "tools/two_cores.toml")
        return choose(_job(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))), comm, CPU, {})


def test_one_rank_has_nothing_to_race(pools: Callable[[str, int], RankPool]) -> None:
    (choice,) = pools("gloo", 1).run(_alone)
    assert choice.plan == Plan()
    assert not choice.race


def test_a_choice_is_recalled_from_a_runs_file() -> None:
    laps = [Lap("dp=2", 0.2, 0.1), Lap("tp=2", None, None, "rank 1: out of memory")]
    choice = Choice(Plan(dp=2), 0.2, 1 << 20, why=[("tp=2", "+50% (measured)")], race=laps)
    again = Choice.recalled(choice.plan, json.loads(json.dumps(choice.about())))
    assert again.race == laps
    assert again.summary() == choice.summary()
    assert str(again) == str(choice)
