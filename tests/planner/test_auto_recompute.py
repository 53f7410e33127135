"""recompute=auto:12GiB: the fastest recomputation that fits, chosen before ranks communicate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import unisono as uni
from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.plan.hardware.toml import read_hardware
from unisono.plan.plan import Plan
from unisono.planner.auto_recompute import resolve_recompute
from unisono.planner.choice import Job
from unisono.planner.planner import Planner

CPU = torch.device("cpu")
TASK = tasks.gpt
JOB = Job(TASK.model, TASK.loss, TASK.optimizer, TASK.batch(0), TASK.rules)


def needs(recompute: str) -> int:
    """Bytes of a rank under dp=2."""
    return int(
        Planner(JOB.task(), read_hardware("h100")).search(2).judged(Plan(dp=2, recompute=recompute)).footprint.total
    )


def test_the_cheapest_that_fits_is_chosen() -> None:
    none, selective, attention, full = map(needs, ("none", "selective", "attention", "full"))
    assert none > max(selective, attention) > full
    for limit, chosen in ((none, "none"), (none - 1, "selective"), (min(selective, attention) - 1, "full")):
        plan, sentence = resolve_recompute(Plan(dp=2, recompute=f"auto:{limit}B"), JOB, torch.device("cuda"))
        assert plan == Plan(dp=2, recompute=chosen)
        assert sentence.startswith(f"recompute={chosen} is the fastest that fits")
    assert resolve_recompute(Plan(dp=2, recompute="full"), JOB, CPU) == (Plan(dp=2, recompute="full"), "")


def test_a_limit_that_nothing_fits_is_one_sentence() -> None:
    with pytest.raises(
        UsageError, match=r"under plan dp=2 a rank needs at least .* \(recompute=full\) of 1.0 KiB; use a"
    ) as found:
        resolve_recompute(Plan(dp=2, recompute="auto:1KiB"), JOB, CPU)
    assert "\n" not in str(found.value)
    with pytest.raises(UsageError, match="pass example="):
        resolve_recompute(Plan(recompute="auto:1KiB"), None, CPU)


@pytest.mark.thorough
def test_under_a_trainer_and_an_engine(pools: Callable[[str, int], RankPool]) -> None:
    for plans, sentence in pools("gloo", 2).run(_chosen):
        assert plans == ["dp=2", "dp=2"]
        assert sentence.startswith("recompute=none is the fastest that fits 12.0 GiB: a rank needs")


def _chosen(comm: uni.Communicator) -> tuple[list[str], str]:
    plan = "dp=2,recompute=auto:12GiB"
    trainer = uni.parallelize(
        TASK.model, plan, loss=TASK.loss, optimizer=TASK.optimizer, example=TASK.batch(0), check="off"
    )
    engine = uni.Engine(TASK.model, TASK.loss, TASK.optimizer, plan=plan, check="off").prepare(TASK.batch(0))
    assert engine.trainer is not None
    assert engine.trainer.chosen == trainer.chosen
    return [str(trainer.plan), str(engine.plan)], trainer.chosen
