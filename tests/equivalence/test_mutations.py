"""verify catches planted faults: one is planted, and the verdict must say no, and where."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.equivalence import tasks
from tests.equivalence.proof import prove
from tests.ranks import RankPool
from unisono.parallel.context.sharded_attention import ShardedAttention
from unisono.parallel.context.tokens import Tokens
from unisono.parallel.expert.expert import MoE
from unisono.parallel.share import Share, batch_slice
from unisono.parallel.trainer import Trainer
from unisono.parallel.zero.zero import ShardedOptimizer


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
    samples = trainer.random.samples

    def from_the_start(positions: Any, of: int) -> Any:
        return samples(range(len(positions)), of)

    trainer.random.samples = from_the_start  # type: ignore[method-assign]


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
    """Clipping by the norm of this rank's shards only."""
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
    attention = context._attention(16)
    other = ShardedAttention(context.comm, context.kind, Tokens.consecutive(16, context.comm.size))

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        attention.calls += 1
        return other._attend(*args, **options)

    attention._attend = attend  # type: ignore[method-assign]


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
                shards = trainer.mesh.comm("ep").all_gather(parameter.detach().clone())
                parameter.data.copy_(shards[1 - trainer.mesh.index("ep")])


def forget_a_microbatch(trainer: Trainer) -> None:
    """Gradients of the last microbatch replace those of all."""
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


def sum_instead(trainer: Trainer) -> None:
    """A wrong scale: gradients are sums where they should be means over the data ranks."""
    finish = trainer.replicas.finish

    def finish_and_multiply() -> None:
        finish()
        for _, parameter in trainer.optimized():
            if parameter.grad is not None:
                parameter.grad *= trainer.plan.dp

    trainer.replicas.finish = finish_and_multiply  # type: ignore[method-assign]


def count_microbatches_full(trainer: Trainer) -> None:
    """Each microbatch counts as if it were all: the loss is a sum of means."""
    partial_loss = trainer._partial_loss

    def as_if_all(outputs: Any, number: int) -> torch.Tensor:
        return partial_loss(outputs, number) * trainer.plan.microbatches

    trainer._partial_loss = as_if_all  # type: ignore[method-assign]


def shuffle_samples(trainer: Trainer) -> None:
    """Inputs stand in another order than their targets."""
    inputs = trainer._inputs
    trainer._inputs = lambda part: inputs(part).roll(1, 0)  # type: ignore[method-assign]


def repeat_samples(trainer: Trainer) -> None:
    """Every data rank trains on the samples of the first."""
    mine = trainer._mine

    def first(batch: Any) -> Share:
        own = mine(batch)
        return Share(batch_slice(batch, 0, len(own.positions)), own.positions, own.of)

    trainer._mine = first  # type: ignore[method-assign]


def normalise_locally(trainer: Trainer) -> None:
    """Statistics that are not synchronised: every rank's BatchNorm sees its own samples."""
    for module in trainer.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = partial(nn.BatchNorm2d.forward, module)  # type: ignore[method-assign,arg-type]


def leave_dropout_out(trainer: Trainer) -> None:
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def keep_gradients(trainer: Trainer) -> None:
    """Gradients of a step are added to those of the step before."""
    trainer.zero_grad = lambda: None  # type: ignore[method-assign]


def learn_faster(trainer: Trainer) -> None:
    """A learning rate that was scaled with the number of ranks."""
    for group in trainer.optimizer.param_groups:
        group["lr"] *= trainer.plan.dp


def learn_faster_on_one_rank(trainer: Trainer) -> None:
    if trainer.mesh.index("dp"):
        learn_faster(trainer)


def keep_parameters_stale(trainer: Trainer) -> None:
    """ZeRO: what other ranks have updated does not arrive on the last rank."""
    replicas = trainer.replicas
    assert isinstance(replicas, ShardedOptimizer)
    publish = replicas.publish

    def publish_and_restore() -> None:
        old = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        publish()
        if trainer.mesh.index("dp"):
            with torch.no_grad():
                for parameter, value in zip(trainer.model.parameters(), old, strict=True):
                    parameter.copy_(value)

    replicas.publish = publish_and_restore  # type: ignore[method-assign]


class Fault(NamedTuple):
    task: str
    plan: str
    plant: Callable[[Trainer], None]
    kind: str  # what deviates
    sentence: str  # in the first divergence, or in what it looks like


_BACKWARD = "gradients do not (first in backward order: "
_UPDATE = "the fault is in clipping or in the optimizer"
_RANK = "does this forward depend on the rank?"
FAULTS = {
    "missing all-reduce": Fault("mlp", "dp=2", forget_to_sum, "gradients", _BACKWARD),
    "average instead of sum": Fault("mlp", "dp=2", average_instead, "gradients", "2 times too small, which is dp"),
    "sum instead of average": Fault("mlp", "dp=2", sum_instead, "gradients", "2 times too large, which is dp"),
    "stale buffer": Fault(
        "conv", "dp=2", keep_buffers_stale, "buffers", "the buffer features.1.running_mean does not: "
    ),
    "local statistics": Fault("conv", "dp=2", normalise_locally, "loss", "features.1 float64"),
    "different mask": Fault("short", "dp=2", draw_other_masks, "loss", _RANK),
    "no dropout": Fault("short", "dp=2", leave_dropout_out, "loss", "drop"),
    "shuffled samples": Fault("mlp2", "dp=2", shuffle_samples, "loss", "is its input this rank's part of the batch?"),
    "samples of another rank": Fault("mlp2", "dp=2", repeat_samples, "loss", "and agrees on rank 0: "),
    "swapped microbatch": Fault("mlp2", "dp=2,microbatches=2", swap_microbatches, "loss", "the loss does not"),
    "a sum of microbatches": Fault(
        "mlp2",
        "dp=2,microbatches=3",
        count_microbatches_full,
        "loss",
        "3 times too large, which is the number of microbatches",
    ),
    "missing all-reduce in tp": Fault("mlp", "tp=2", drop_a_row_reduction, "loss", "blocks.1.fc2 "),
    "clipping by the local norm": Fault("mlp", "tp=2", clip_by_local_norm, "parameters", _UPDATE),
    "a mean of means": Fault("short", "dp=2", normalise_by_rank, "loss", "the loss does not"),
    "tied gradients twice": Fault(
        "short", "pp=2,microbatches=2", count_tied_twice, "gradients", "2 times too large, which is pp"
    ),
    "the first stage's tied copy": Fault(
        "short", "pp=2,microbatches=2", partial(part_from_a_tied_copy, 0), "parameters", _UPDATE
    ),
    "the last stage's tied copy": Fault(
        "short", "pp=2,microbatches=2", partial(part_from_a_tied_copy, 1), "parameters", "or in updates on other ranks"
    ),
    "positions in cp": Fault("short", "cp=2", mistake_positions, "loss", "blocks.0.attention"),
    "another expert": Fault("moe", "dp=2,ep=2", confuse_experts, "loss", "moe"),
    "experts on the wrong rank": Fault("moe", "dp=2,ep=2", send_to_the_wrong_rank, "loss", "moe"),
    "a forgotten microbatch": Fault("mlp2", "dp=2,microbatches=2", forget_a_microbatch, "gradients", _BACKWARD),
    "gradients of two steps": Fault(
        "mlp", "dp=2", keep_gradients, "gradients", "does a step keep another's gradients?"
    ),
    "a step too many": Fault("mlp", "dp=2", step_twice, "parameters", "or in updates on other ranks"),
    "another learning rate": Fault(
        "mlp", "dp=2", learn_faster, "parameters", "the optimizer's lr is 0.1 under the plan and 0.05 on one device"
    ),
    "another learning rate on a rank": Fault(
        "mlp", "dp=2", learn_faster_on_one_rank, "parameters", "lr is 0.1 on rank 1 and"
    ),
    "stale parameters": Fault("mlp", "dp=2,zero=1", keep_parameters_stale, "parameters", _UPDATE),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(pools: Callable[[str, int], RankPool], name: str) -> None:
    fault = FAULTS[name]
    verdict = pools("gloo", 2).run(prove, "tasks", fault.task, fault.plan, "float64", fault.plant)[0]
    assert not verdict.equivalent
    worst = {each.kind: each for each in verdict.worst}
    assert worst["initial parameters"].deviation == 0
    assert worst[fault.kind].deviation > 1e-6, verdict
    assert fault.sentence in f"{verdict.first_divergence}; {verdict.guess}", verdict
    if name in ("a step too many", "another learning rate on a rank"):
        assert "rank 1 beside rank 0" in worst["parameters"].name, verdict
