"""verify catches planted faults: one is planted, and the verdict must say no, and where."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.equivalence import tasks
from tests.equivalence.proof import prove
from tests.ranks import RankPool
from unisono.parallel.expert import MoE
from unisono.parallel.spread_attention import SpreadAttention
from unisono.parallel.tokens import Tokens
from unisono.parallel.trainer import Trainer


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


def clip_by_local_norm(trainer: Trainer) -> None:
    """Clipping by the norm of this rank's pieces only."""
    limit = trainer.clip
    assert limit is not None

    def clip() -> None:
        gradients = [parameter.grad for _, parameter in trainer.optimized() if parameter.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient *= min(1.0, limit / norm.item())

    trainer._clip = clip  # type: ignore[method-assign]


def normalise_by_rank(trainer: Trainer) -> None:
    """The mean of the ranks' means: wrong where they count different numbers of tokens."""
    loss = tasks.short.loss

    def partial_loss(outputs: Any, number: int) -> torch.Tensor:
        return loss(outputs, trainer._targets(trainer._microbatches[number])) / trainer.plan.dp

    trainer._partial_loss = partial_loss  # type: ignore[method-assign]


def count_tied_twice(trainer: Trainer) -> None:
    """A weight on two stages: the sum of its gradients is summed once more."""
    tied = trainer.tied
    assert tied is not None
    summed = tied.sum

    def sum_twice(*args: Any) -> None:
        summed(*args)
        summed(*args)

    tied.sum = sum_twice  # type: ignore[method-assign]


def part_from_a_tied_copy(stage: int, trainer: Trainer) -> None:
    """One stage's copy of a weight that two stages have, in the last step: no later step will tell."""
    if trainer.mesh.index("pp") != stage:
        return
    step = trainer.optimizer.step

    def step_and_part() -> None:
        step()
        if trainer.steps == 1:
            with torch.no_grad():
                dict(trainer.optimized())["tokens.weight"].mul_(1.001)

    trainer.optimizer.step = step_and_part  # type: ignore[method-assign]


def mistake_positions(trainer: Trainer) -> None:
    """Attention takes tokens that lie in zigzag for consecutive ones, so its causal mask is off."""
    context = trainer.context
    assert context is not None
    spread = context._attention(16)
    other = SpreadAttention(context.comm, context.kind, Tokens.consecutive(16, context.comm.size))

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        spread.calls += 1
        return other._attend(*args, **options)

    spread._attend = attend  # type: ignore[method-assign]


def confuse_experts(trainer: Trainer) -> None:
    """Visits reach the right rank, but another expert there."""
    for module in trainer.model.modules():
        if isinstance(module, MoE):
            module.run_expert = _other_expert(module)  # type: ignore[method-assign]


def _other_expert(moe: MoE) -> Callable[[int, torch.Tensor], torch.Tensor]:
    run = moe.run_expert
    return lambda number, x: run(len(moe.up) - 1 - number, x)


def send_to_the_wrong_rank(trainer: Trainer) -> None:
    """Experts went to the other rank than the routes say."""
    for module in trainer.model.modules():
        if isinstance(module, MoE):
            for name in ("up", "up_bias", "down", "down_bias"):
                parameter = getattr(module, name)
                pieces = trainer.mesh.comm("ep").all_gather(parameter.detach().clone())
                parameter.data.copy_(pieces[1 - trainer.mesh.index("ep")])


def forget_a_microbatch(trainer: Trainer) -> None:
    """Gradients of the last microbatch take the place of all."""
    partial_loss = trainer._partial_loss

    def forgetting(outputs: Any, number: int) -> torch.Tensor:
        trainer.optimizer.zero_grad()
        return partial_loss(outputs, number)

    trainer._partial_loss = forgetting  # type: ignore[method-assign]


def step_twice(trainer: Trainer) -> None:
    """The optimizer of the last rank takes a step too many, in the last step: no gradient will ever tell."""
    if trainer.mesh.index("dp") == 0:
        return
    step = trainer.optimizer.step

    def again() -> None:
        step()
        if trainer.steps == 1:
            step()

    trainer.optimizer.step = again  # type: ignore[method-assign]


FAULTS: dict[str, tuple[str, str, Callable[[Trainer], None], str]] = {
    "missing all-reduce": ("mlp", "dp=2", forget_to_sum, "gradients"),
    "wrong scale": ("mlp", "dp=2", average_instead, "gradients"),
    "stale buffer": ("conv", "dp=2", keep_buffers_stale, "buffers"),
    "different mask": ("short", "dp=2", draw_other_masks, "loss"),
    "swapped microbatch": ("mlp2", "dp=2,microbatches=2", swap_microbatches, "loss"),
    "missing all-reduce in tp": ("mlp", "tp=2", drop_a_row_reduction, "loss"),
    "clipping by the local norm": ("mlp", "tp=2", clip_by_local_norm, "parameters"),
    "a mean of means": ("short", "dp=2", normalise_by_rank, "loss"),
    "tied gradients twice": ("short", "pp=2,microbatches=2", count_tied_twice, "gradients"),
    "the first stage's tied copy": ("short", "pp=2,microbatches=2", partial(part_from_a_tied_copy, 0), "parameters"),
    "the last stage's tied copy": ("short", "pp=2,microbatches=2", partial(part_from_a_tied_copy, 1), "parameters"),
    "positions in cp": ("short", "cp=2", mistake_positions, "loss"),
    "another expert": ("moe", "dp=2,ep=2", confuse_experts, "loss"),
    "experts on the wrong rank": ("moe", "dp=2,ep=2", send_to_the_wrong_rank, "loss"),
    "a forgotten microbatch": ("mlp2", "dp=2,microbatches=2", forget_a_microbatch, "gradients"),
    "a step too many": ("mlp", "dp=2", step_twice, "parameters"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(pools: Callable[[str, int], RankPool], fault: str) -> None:
    task, plan, plant, kind = FAULTS[fault]
    verdict = pools("gloo", 2).run(prove, "tasks", task, plan, "float64", plant)[0]
    assert not verdict.equivalent
    worst = {each.kind: each.deviation for each in verdict.worst}
    assert worst["initial parameters"] == 0
    assert worst[kind] > 1e-6, verdict
    if fault == "wrong scale":
        assert "2 times too small, which is dp" in verdict.guess, verdict
    if fault == "different mask":
        assert "blocks.0" in verdict.parting or "attention" in verdict.parting, verdict
    if fault == "missing all-reduce in tp":
        assert "blocks.1.fc2" in verdict.parting, verdict
    if fault == "missing all-reduce":
        assert "activations agree" in verdict.parting, verdict
    if fault == "a step too many":
        assert "rank 1 beside rank 0" in next(each.name for each in verdict.worst if each.kind == "parameters"), verdict
    if fault == "tied gradients twice":
        assert "2 times too large, which is pp" in verdict.guess, verdict
    if fault == "positions in cp":
        assert "blocks.0.attention" in verdict.parting, verdict
    if fault in ("another expert", "experts on the wrong rank"):
        assert "moe" in verdict.parting, verdict
