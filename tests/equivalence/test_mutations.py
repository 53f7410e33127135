"""verify catches planted faults: one is planted, and the verdict must say no, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan
from unisono.train.verify import Verdict, verify_here


def forget_to_sum(trainer: Trainer) -> None:
    """A missing all-reduce: gradients stay those of this rank's samples."""
    trainer.replicas.remove()
    trainer.replicas.finish = lambda: None  # type: ignore[method-assign]


def average_instead(trainer: Trainer) -> None:
    """A wrong scale: gradients are divided by the number of data ranks."""
    finish = trainer.replicas.finish

    def finish_and_divide() -> None:
        finish()
        for _, parameter in trainer.optimized():
            if parameter.grad is not None:
                parameter.grad /= trainer.plan.dp

    trainer.replicas.finish = finish_and_divide  # type: ignore[method-assign]


def keep_buffers_stale(trainer: Trainer) -> None:
    """A stale buffer: running statistics are not updated."""
    for module in trainer.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_hook(_forget_mean)


def _forget_mean(module: Any, *_: Any) -> None:
    module.running_mean.zero_()


def draw_other_masks(trainer: Trainer) -> None:
    """A different mask: every data rank draws as if it had the first samples."""
    sharded = trainer.random.sharded

    def from_the_start(dim: int, positions: Any, of: int, **options: Any) -> Any:
        return sharded(dim, range(len(positions)), of, **options)

    trainer.random.sharded = from_the_start  # type: ignore[method-assign]


def swap_microbatches(trainer: Trainer) -> None:
    """A swapped microbatch: the targets of one belong to the inputs of another."""
    targets = trainer._targets

    def of_the_other(part: Any) -> Any:
        parts = trainer._microbatches
        number = next(i for i, each in enumerate(parts) if each is part)
        return targets(parts[len(parts) - 1 - number])

    trainer._targets = of_the_other  # type: ignore[method-assign]


def drop_a_row_reduction(trainer: Trainer) -> None:
    """A missing all-reduce in a tensor-parallel layer: one row-parallel layer keeps its partial sum."""
    layer = trainer.model.get_submodule("blocks.1.fc2")
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]


FAULTS: dict[str, tuple[str, str, Callable[[Trainer], None], str]] = {
    "missing all-reduce": ("mlp", "dp=2", forget_to_sum, "gradients"),
    "wrong scale": ("mlp", "dp=2", average_instead, "gradients"),
    "stale buffer": ("conv", "dp=2", keep_buffers_stale, "buffers"),
    "different mask": ("gpt", "dp=2", draw_other_masks, "loss"),
    "swapped microbatch": ("mlp2", "dp=2,microbatches=2", swap_microbatches, "loss"),
    "missing all-reduce in tp": ("mlp", "tp=2", drop_a_row_reduction, "loss"),
}


def prove_with(comm: Communicator, fault: str) -> Verdict:
    task, plan, plant, _ = FAULTS[fault]
    return verify_here(comm, getattr(tasks, task), Plan.parse(plan), steps=2, prepare=plant)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(pools: Callable[[str, int], RankPool], fault: str) -> None:
    verdict = pools("gloo", 2).run(prove_with, fault)[0]
    assert not verdict.equivalent
    worst = {each.kind: each.deviation for each in verdict.worst}
    assert worst["initial parameters"] == 0
    assert worst[FAULTS[fault][3]] > 1e-6, verdict
    if fault == "wrong scale":
        assert "2 times too small, which is dp" in verdict.guess, verdict
    if fault == "different mask":
        assert "blocks.0" in verdict.parting or "attention" in verdict.parting, verdict
    if fault == "missing all-reduce in tp":
        assert "blocks.1.fc2" in verdict.parting, verdict
    if fault == "missing all-reduce":
        assert "activations agree" in verdict.parting, verdict
