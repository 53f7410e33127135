"""Half precision: as one process under torch.autocast and GradScaler; all ranks take a step, or none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.equivalence import tasks
from tests.equivalence.proof import prove
from tests.equivalence.test_mutations import average_instead
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel import master_weights
from unisono.parallel.apply import parallelize
from unisono.parallel.loss.loss_scale import LossScaler
from unisono.parallel.precision import Precision
from unisono.parallel.trainer import Trainer
from unisono.parallel.zero.shards import ZeroShard
from unisono.plan.plan import Plan
from unisono.verify.compare import Verdict
from unisono.verify.training_record import plain_record, planned_record
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
CASES = [
    ("short", "cp=2", "float32"),  # its biases of keys get gradients of rounding
    ("conv", "dp=2", "float32"),  # and so do those before BatchNorm
    ("mlp", "dp=2,zero=1", "float16"),
    ("conv", "dp=2", "bfloat16"),
    ("short", "dp=2,zero=2,microbatches=2", "bfloat16"),
    ("short", "dp=2,zero=3,recompute=full", "float16"),
    ("short", "tp=2,sp", "bfloat16"),
    ("short", "cp=2", "bfloat16"),
    ("short", "cp=2,context=ulysses", "float16"),
    ("short", "pp=2,microbatches=4,schedule=zb1p", "bfloat16"),
    ("short", "dp=2,pp=2,microbatches=2,zero=3", "float16"),
    ("short", "dp=2,tp=2", "float16"),
    ("moe", "dp=2,ep=2", "bfloat16"),
]


@pytest.mark.parametrize(("task", "plan", "dtype"), CASES)
def test_a_plan_changes_nothing_but_rounding(pools: Pools, task: str, plan: str, dtype: str) -> None:
    verdict = pools("gloo", Plan.parse(plan).world).run(prove, "tasks", task, plan, dtype)[0]
    assert verdict.equivalent, verdict


def _half_model() -> nn.Module:
    return tasks.short.model().bfloat16()


EMULATED = {
    "weights": dataclasses.replace(tasks.short, precision="bf16"),
    "masters": dataclasses.replace(tasks.short, model=_half_model, precision="bf16"),
    "stochastic": dataclasses.replace(tasks.short, model=_half_model, precision="bf16,master=none"),
    "kahan": dataclasses.replace(tasks.short, model=_half_model, precision="bf16,master=none,rounding=kahan"),
}


def proved_by_emulation(comm: Communicator, task: str, plan: str, fault: str = "") -> Verdict:
    if not fault:
        return verify_here(comm, EMULATED[task], Plan.parse(plan), steps=3)
    with pytest.MonkeyPatch.context() as patch:
        if fault == "publish":  # ranks get float32 where one device rounds
            patch.setattr(ZeroShard, "published", lambda shard: shard.optimized.detach())
        else:  # every rank rounds by the indices in its own shard
            patch.setattr(master_weights, "parts_of", lambda tensor, mesh: {})
        return verify_here(comm, EMULATED[task], Plan.parse(plan), steps=3)


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        ("weights", "dp=2"),
        ("weights", "dp=2,zero=1"),
        ("weights", "dp=2,zero=3"),
        ("weights", "tp=2,sp,zero=1"),
        ("weights", "pp=2,microbatches=2,zero=2"),
        ("masters", "dp=2"),
        ("masters", "dp=2,zero=3"),
        ("masters", "tp=2"),
        ("stochastic", "dp=2,zero=2"),
        ("stochastic", "tp=2"),
        ("kahan", "dp=2,zero=3"),
        ("kahan", "pp=2,microbatches=2"),
    ],
)
def test_roundings_of_parameters_are_proved_in_float64(pools: Pools, task: str, plan: str) -> None:
    verdict = pools("gloo", 2).run(proved_by_emulation, task, plan)[0]
    assert verdict.equivalent, verdict
    assert all(each.deviation < 1e-9 for each in verdict.worst), verdict


def test_a_rounding_that_is_left_out_is_found(pools: Pools) -> None:
    assert not pools("gloo", 2).run(proved_by_emulation, "weights", "dp=2,zero=3", "publish")[0].equivalent
    assert not pools("gloo", 2).run(proved_by_emulation, "stochastic", "dp=2,zero=1", "indices")[0].equivalent


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_wrong_scale_is_more_than_rounding(pools: Pools, dtype: str) -> None:
    verdict = pools("gloo", 2).run(prove, "tasks", "short", "dp=2", dtype, average_instead)[0]
    assert not verdict.equivalent
    assert {each.kind: each.deviation for each in verdict.worst}["gradients"] > 0.4


def scales(comm: Communicator, plan: str) -> list[list[float]]:
    """Under the plan and on one device, where all steps overflow, and where none does.

    In between, the scale at which a step overflows depends on how sums over samples are sharded, and so on the plan.
    """
    found = []
    for precision in (Precision("fp16", init_scale=2.0**40), Precision("fp16", init_scale=16, growth_interval=2)):
        planned = planned_record(tasks.mlp, Plan.parse(plan), 6, torch.float32, precision=precision)
        plain = plain_record(tasks.mlp, 6, torch.float32, precision=precision)
        torch.testing.assert_close(planned.losses, plain.losses, rtol=2e-3, atol=0)
        found += [planned.scales, plain.scales]
    return found


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "pp=2,microbatches=2,zero=2"])
def test_scales_are_those_of_gradscaler(pools: Pools, plan: str) -> None:
    falling = [2.0**power for power in range(39, 33, -1)]
    growing = [16.0, 32.0, 32.0, 64.0, 64.0, 128.0]
    assert pools("gloo", 2).run(scales, plan) == [[falling, falling, growing, growing]] * 2


def parameters_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.optimized()}


def trainer_of(plan: str, clip: float | None = 0.3) -> Trainer:
    task = tasks.short
    return parallelize(
        task.model,
        plan,
        loss=task.loss,
        optimizer=task.optimizer,
        example=task.batch(0),
        rules=task.rules,
        clip=clip,
        precision=Precision("fp16", init_scale=2.0**10),
    )


def one_rank_overflows(comm: Communicator, plan: str, clip: float | None = 0.3) -> tuple[float, int, bool]:
    """An inf in one gradient of the last rank only, in the second of three steps."""
    trainer = trainer_of(plan, clip)
    assert torch.isfinite(trainer.step(tasks.short.batch(0)))
    before = parameters_of(trainer)
    hooks = []
    if comm.rank == comm.size - 1:
        mine = next(p for name, p in trainer.model.named_parameters() if name.endswith("fc1.weight"))
        hooks.append(mine.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.inf)))
    trainer.step(tasks.short.batch(1))
    is_unchanged = all(torch.equal(before[name], tensor) for name, tensor in trainer.optimized())
    for hook in hooks:
        hook.remove()
    assert trainer.scaler is not None
    scale = trainer.scaler.value
    assert torch.isfinite(trainer.step(tasks.short.batch(2)))
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.optimized())
    return scale, trainer.skipped, is_unchanged


OVERFLOWS = ["dp=2", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "cp=2", "pp=2,microbatches=4"]


@pytest.mark.parametrize("plan", OVERFLOWS)
def test_one_rank_overflows_and_all_skip_the_step(pools: Pools, plan: str) -> None:
    assert pools("gloo", 2).run(one_rank_overflows, plan) == [(2.0**9, 1, True)] * 2


def each_decides_alone(comm: Communicator, plan: str) -> tuple[float, int, bool]:
    """The fault: nobody asks the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossScaler, "_anywhere", lambda scaler, found: found)
        return one_rank_overflows(comm, plan)


def test_without_agreement_ranks_would_part(pools: Pools) -> None:
    """So the test above can fail."""
    one, other = pools("gloo", 2).run(each_decides_alone, "pp=2,microbatches=4")
    assert one != other


def state_moves(comm: Communicator, before: str, after: str) -> dict[str, Any]:
    """Training goes on under another plan, with the scale and all else that it had."""
    first, going_on = trainer_of(before), trainer_of(before)
    for step in range(2):
        first.step(tasks.short.batch(step))
        going_on.step(tasks.short.batch(step))
    assert first.scaler is not None
    first.scaler.load_state_dict({"scale": 2.0**9, "good_steps": 7})
    state = first.state_dict()
    other = trainer_of(after)
    other.load_state_dict(state)
    assert other.steps == 2
    assert other.scaler is not None
    assert other.scaler.value == 2.0**9
    same_loss = [float(trainer.step(tasks.short.batch(2))) for trainer in (going_on, other)]
    assert same_loss[0] == pytest.approx(same_loss[1], rel=2e-3)
    again = other.state_dict()
    assert again["steps"] == 3
    assert set(again["model"]) == set(state["model"])
    assert {name: set(entries) for name, entries in again["optimizer"]["state"].items()} == {
        name: set(entries) for name, entries in state["optimizer"]["state"].items()
    }
    wrong = dict(state, model={name: t for name, t in state["model"].items() if "fc1" not in name})
    with pytest.raises(UsageError, match="has no blocks"):
        other.load_state_dict(wrong)
    return {name: tensor.sum().item() for name, tensor in state["model"].items()}


@pytest.mark.parametrize(
    ("before", "after"), [("dp=2,zero=3", "pp=2,microbatches=4"), ("pp=2,microbatches=4,zero=2", "tp=2,zero=1")]
)
def test_the_state_goes_to_other_plans(pools: Pools, before: str, after: str) -> None:
    one, other = pools("gloo", 2).run(state_moves, before, after)
    assert one == other


def refused(comm: Communicator) -> None:
    task = tasks.mlp
    build = {"loss": task.loss, "optimizer": task.optimizer}
    with pytest.raises(UsageError, match="precision='fp4'; expected one of fp32, bf16, fp16, fp8"):
        parallelize(task.model, "dp=1", precision="fp4", **build)
    with pytest.raises(UsageError, match="keeps parameters in float32, but first"):
        parallelize(task.model, "dp=1", precision="bf16", dtype=torch.float64, **build)
    with pytest.raises(UsageError, match="LBFGS, which evaluates the model several times"):
        parallelize(task.model, "dp=1", precision="fp16", loss=task.loss, optimizer=torch.optim.LBFGS)


def test_refusals(pools: Pools) -> None:
    pools("gloo", 1).run(refused)
