"""The self-check: sound plans pass it, it leaves no trace, and it stops what is wrong."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as uni
from tests.equivalence.test_plans import PLANS
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.plan.plan import Plan

Pools = Callable[[str, int], RankPool]
SOME = {  # of each strategy, and of what each kind of model asks of it
    "mlp": ["dp=2,zero=1,microbatches=3,offload", "dp=2,zero=2", "pp=2,tp=2,microbatches=4,schedule=zb1p"],
    "conv": ["dp=2,zero=1", "dp=4,zero=3"],
    "gpt": ["dp=2,pp=2,microbatches=4,zero=3,schedule=interleaved,chunks=2"],
    "short": ["tp=2,sp", "cp=2", "recompute=full,microbatches=3", "dp=2,zero=3,recompute=full"],
    "moe": ["dp=2,ep=2", "dp=2,ep=2,pp=2,microbatches=2"],
    "tuned": ["dp=2,zero=3", "tp=2"],
    "vocabulary": ["dp=2,tp=2,sp,microbatches=2"],
}
assert all(plan in PLANS[task] for task, plans in SOME.items() for plan in plans)


def _trained(comm: Communicator, task: Any, plan: str, check: str, **options: Any) -> tuple[str, list[str], int]:
    torch.manual_seed(comm.rank)
    trainer = uni.parallelize(
        task.model,
        plan,
        loss=task.loss,
        optimizer=task.optimizer,
        rules=task.rules,
        clip=task.clip,
        check=check,
        **{"example": task.batch(0)} | options,
    )
    losses = [trainer.step(task.batch(step)).item().hex() for step in range(2)]
    return trainer.proof, losses, int(torch.randint(2**60, ())) ^ random.getrandbits(60)


def _with_and_without(comm: Communicator, name: str, plan: str, **options: Any) -> tuple[str, Any, Any]:
    task = getattr(importlib.import_module("tests.equivalence.tasks"), name)
    state = random.getstate()
    _, *without = _trained(comm, task, plan, "off", **options)
    random.setstate(state)
    proof, *with_check = _trained(comm, task, plan, "auto", **options)
    return proof, without, with_check


@pytest.mark.parametrize(("task", "plan"), [(task, plan) for task, plans in SOME.items() for plan in plans])
def test_a_sound_plan_is_proved_and_the_check_leaves_no_trace(pools: Pools, task: str, plan: str) -> None:
    """Losses of the steps after it, and the numbers that torch and Python draw then, are those of a run without it."""
    for proof, without, with_check in pools("gloo", Plan.parse(plan).world).run(_with_and_without, task, plan):
        assert proof.startswith(f"plan {Plan.parse(plan)} proved on your model: worst gradient"), proof
        assert with_check == without
