"""The self-check: sound plans pass it, it leaves no trace, and it stops what is wrong."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import unisono as uni
from tests.equivalence.test_mutations import FAULTS
from tests.equivalence.test_plans import PLANS, world_of
from tests.ranks import RankPool
from tests.verify.wrong_models import WRONG
from unisono.comm.communicator import Communicator
from unisono.errors import PlanMismatch, UsageError
from unisono.plan.plan import Plan
from unisono.verify import self_check

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


CASES = sorted(((task, plan) for task, plans in SOME.items() for plan in plans), key=lambda case: world_of(case[1]))


@pytest.mark.parametrize(("task", "plan"), CASES)
def test_a_sound_plan_is_proved_and_the_check_leaves_no_trace(pools: Pools, task: str, plan: str) -> None:
    """Losses of the steps after it, and the numbers that torch and Python draw then, are those of a run without it."""
    for proof, without, with_check in pools("gloo", Plan.parse(plan).world).run(_with_and_without, task, plan):
        assert proof.startswith(f"plan {Plan.parse(plan)} proved on your model: worst gradient"), proof
        assert with_check == without


# ---- what is wrong is stopped ----------------------------------------------------------------------------------------

# Only in the second step.
LATER = ("the first stage's tied copy", "the last stage's tied copy", "a step too many", "gradients of two steps")


def _with_planted_fault(comm: Communicator, fault: str) -> str:
    name, plan, plant, *_ = FAULTS[fault]
    task = getattr(importlib.import_module("tests.equivalence.tasks"), name)
    original = self_check.planned_step

    def faulty(trainer: Any, *args: Any) -> Any:
        plant(trainer)
        return original(trainer, *args)

    self_check.planned_step = faulty
    try:
        with pytest.raises(PlanMismatch) as stopped:
            _trained(comm, task, plan, "auto")
        return str(stopped.value)
    finally:
        self_check.planned_step = original


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in LATER])
def test_a_planted_fault_stops_the_run(pools: Pools, fault: str) -> None:
    """On every rank, with the same sentence, before a step counts."""
    sentences = pools("gloo", 2).run(_with_planted_fault, fault)
    assert len(set(sentences)) == 1
    assert sentences[0].startswith(f"plan {FAULTS[fault].plan} does not give the result of one device on your model: ")
    assert 'check="off"' in sentences[0]


def _with_gradient_of_another_rank(comm: Communicator) -> str:
    """A fault that one step of a scale-free optimizer does not show in parameters, and on rank 1 only."""
    original = self_check.planned_step

    def faulty(trainer: Any, *args: Any) -> Any:
        if comm.rank == 1:
            trainer.model.get_parameter("last.weight").register_hook(lambda gradient: gradient * 1.5)
        return original(trainer, *args)

    task = importlib.import_module("tests.equivalence.tasks").mlp
    with mock.patch.object(self_check, "planned_step", faulty), pytest.raises(PlanMismatch) as stopped:
        _trained(comm, replace(task, clip=None, optimizer=_scale_free), "tp=2", "auto")
    return str(stopped.value)


def _scale_free(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adamax(parameters, lr=1e-2)


def test_a_gradient_that_is_wrong_on_another_rank_stops_the_run(pools: Pools) -> None:
    for sentence in pools("gloo", 2).run(_with_gradient_of_another_rank):
        assert "the gradient of last.weight is off by" in sentence


class _Branch(nn.Module):
    """Begins as nothing: its last layer is of zeros, and its gate of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _hidden_by_constants(comm: Communicator, fault: str) -> str:
    """Faults that no first step from the initial parameters shows: every rank adds a bias; a gradient
    that is zero is scaled."""
    batch = (torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 8))
    original = self_check.planned_step

    def faulty(trainer: Any, *args: Any) -> Any:
        if fault == "bias":
            down = trainer.model[0].down
            down.register_forward_hook(lambda module, args, output: output + module.bias.detach())
        if fault == "gradient":
            trainer.model[0].up.weight.register_hook(lambda gradient: 2 * gradient)
        return original(trainer, *args)

    with mock.patch.object(self_check, "planned_step", faulty):
        try:
            return uni.parallelize(
                lambda: nn.Sequential(_Branch(), nn.Linear(8, 8)),
                "tp=2",
                loss=nn.functional.mse_loss,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                rules={"0.up": "column", "0.down": "row"},
                example=batch,
            ).proof
        except PlanMismatch as error:
            return f"stopped: {error}"


@pytest.mark.parametrize("fault", ["none", "bias", "gradient"])
def test_what_an_initialization_with_zeros_hides(pools: Pools, fault: str) -> None:
    for outcome in pools("gloo", 2).run(_hidden_by_constants, fault):
        assert outcome.startswith("stopped: " if fault != "none" else "plan tp=2 proved on your model"), outcome


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of a refusal or of a step that makes a plan right."""


def _unwatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


# What makes these pairs right, or refuses them: (module, name in it, what replaces it).
SWITCHED_OFF: dict[str, list[tuple[str, str, Any]]] = {
    "linear subclass": [("unisono.parallel.tensor.custom_layers", "is_plain", lambda module: True)],
    "forward hooks": [
        ("unisono.parallel.tensor.user_hooks", "carry_hooks", _nothing),
        ("unisono.parallel.tensor.user_hooks", "show_full_tensors", _nothing),
        ("unisono.parallel.tensor.user_hooks", "guard_hooks", _nothing),
    ],
    "weights beyond their layer, by rules": [
        ("unisono.parallel.checks.parameter_reads.ParameterReads", "__torch_function__", _unwatched)
    ],
    "step hook, tp": [
        ("unisono.parallel.checks.optimizer_scope", "require_elementwise_hooks", _nothing),
        ("unisono.parallel.trainer", "require_elementwise_hooks", _nothing),
    ],
    "step hook, zero": [
        ("unisono.parallel.checks.optimizer_scope", "require_elementwise_hooks", _nothing),
        ("unisono.parallel.trainer", "require_elementwise_hooks", _nothing),
    ],
    "time-major dropout": [("unisono.parallel.apply", "find_samples", _nothing)],
    "table dropout": [("unisono.parallel.apply", "find_samples", _nothing)],
    "mixed samples": [("unisono.parallel.apply", "find_samples", _nothing)],
    "batch size": [("unisono.parallel.apply", "find_samples", _nothing)],
    "task weights": [("unisono.parallel.loss.loss.GlobalLoss", "_prove", _nothing)],
    "max_norm": [
        ("unisono.parallel.checks.separable", "_require_plain_lookup", _nothing),
        ("unisono.parallel.apply", "find_samples", _nothing),
    ],
    "scale_grad_by_freq": [("unisono.parallel.checks.separable", "_require_plain_lookup", _nothing)],
    "tokens mixed by a maximum": [("unisono.parallel.apply", "require_tokenwise", _nothing)],
}


def _outcome(comm: Communicator, name: str, is_switched_off: bool) -> str:
    """What comes of a pair that once trained wrong; with what now prevents that switched off or not."""
    task, plan = WRONG[name]
    with contextlib.ExitStack() as stack:
        for where, attribute, replacement in SWITCHED_OFF[name] if is_switched_off else ():
            stack.enter_context(mock.patch.object(pkgutil.resolve_name(where), attribute, replacement))
        try:
            return _trained(comm, task, plan, "auto")[0]
        except PlanMismatch as error:
            return f"stopped: {error}"
        except UsageError as error:
            return f"refused: {error}"


@pytest.mark.parametrize("name", WRONG)
def test_what_once_trained_wrong_is_right_refused_or_stopped(pools: Pools, name: str) -> None:
    outcomes = pools("gloo", Plan.parse(WRONG[name][1]).world).run(_outcome, name, False)
    kinds = {outcome.partition(":")[0] for outcome in outcomes}
    assert len(kinds) == 1, outcomes
    assert kinds <= {"refused", "stopped", f"plan {WRONG[name][1]} proved on your model"}, outcomes


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_without_what_prevents_it_a_wrong_run_is_stopped(pools: Pools, name: str) -> None:
    outcomes = pools("gloo", Plan.parse(WRONG[name][1]).world).run(_outcome, name, True)
    assert {outcome.partition(":")[0] for outcome in outcomes} == {"stopped"}, outcomes


def _copied_at_the_first_batch(comm: Communicator, name: str) -> str:
    task, plan = WRONG[name]
    try:
        return _trained(comm, task, plan, "auto", example=None)[0]
    except PlanMismatch as error:
        return f"stopped: {error}"


def test_without_an_example_the_first_batch_is_one(pools: Pools) -> None:
    sound, wrong = (
        pools("gloo", 2).run(_with_and_without_example)[0],
        pools("gloo", 2).run(_copied_at_the_first_batch, "world loss")[0],
    )
    assert "proved on your model" in sound[0]
    assert sound[1] == sound[2]
    assert wrong.startswith("stopped: ")
    assert "the loss is off by 1" in wrong


def _with_and_without_example(comm: Communicator) -> tuple[str, Any, Any]:
    return _with_and_without(comm, "mlp", "dp=2", example=None)


def _of_a_large_model(comm: Communicator) -> tuple[str, Any, Any]:
    """As of one that one device cannot hold."""
    with mock.patch.object(self_check, "fits", return_value=False):
        return _with_and_without(comm, "gpt", "dp=2,zero=3")


def test_of_a_large_model_a_reduced_one_is_proved(pools: Pools) -> None:
    for proof, without, with_check in pools("gloo", 2).run(_of_a_large_model):
        assert "proved on a reduced model with 2 of its 4 blocks" in proof
        assert with_check == without


def _levels(comm: Communicator) -> list[str]:
    task = importlib.import_module("tests.equivalence.tasks").mlp
    reported = [_trained(comm, task, "dp=2", "off")[0], _trained(comm, task, "dp=2", "full")[0]]
    with mock.patch.dict(os.environ, UNISONO_CHECK_PLAN="off"):
        reported.append(_trained(comm, task, "dp=2", "full")[0])
    with pytest.raises(UsageError, match=r"check='always'; expected one of auto, full, off"):
        _trained(comm, task, "dp=2", "always")
    return reported


def test_levels(pools: Pools) -> None:
    off, full, overridden = pools("gloo", 2).run(_levels)[0]
    assert (off, overridden) == ("", "")
    assert "proved on your model" in full
