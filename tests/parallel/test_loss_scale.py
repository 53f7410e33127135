"""fp16: what a step that overflows leaves as it was, and that the host need not know which one did."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from unisono.mesh.optimizers import can_be_skipped
from unisono.parallel.loss.loss_scale import LossScaler
from unisono.parallel.precision import Precision
from unisono.parallel.trainer import Trainer

Make = Callable[[Any], torch.optim.Optimizer]
ON_DEVICE: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
}
WAITING: dict[str, Make] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
OPTIMIZERS = {**ON_DEVICE, **WAITING}


class Device:
    """Where the test runs."""

    name = "cpu"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    monkeypatch.setattr(Device, "name", request.param)


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(8, 16, generator=drawn), torch.randint(4, (8,), generator=drawn)
    return inputs.to(Device.name), targets.to(Device.name)


def _trainer(make: Make, clip: float | None = 0.1, interval: int = 2, dtype: torch.dtype | None = None) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(Device.name, dtype)
    precision = Precision("fp16", init_scale=2.0**10, growth_interval=interval)
    return uni.parallelize(
        model, "dp=1", loss=F.cross_entropy, optimizer=make, clip=clip, precision=precision, check="off"
    )


def test_the_default_dtype_is_not_that_of_the_scale() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        trainer = _trainer(ON_DEVICE["adamw"], dtype=torch.float32)
        for step in range(2):
            inputs, targets = _batch(step)
            trainer.step((inputs.float(), targets))
    finally:
        torch.set_default_dtype(torch.float32)
    assert trainer.skipped == 0


def _overflow(trainer: Trainer, seed: int = 0) -> None:
    """A step with an inf in one gradient."""
    weight = trainer.model.get_parameter("2.weight")
    hook = weight.register_hook(lambda gradient: gradient.where(gradient > gradient.min(), math.inf))
    trainer.step(_batch(seed))
    hook.remove()


def _held(trainer: Trainer) -> dict[str, Any]:
    """All that a step may change, but for its number and the scale."""
    held: dict[str, Any] = {name: parameter.detach().clone() for name, parameter in trainer.optimized()}
    for name, parameter in trainer.optimized():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            held[f"{name} {key}"] = value.clone() if isinstance(value, torch.Tensor) else value
    groups = [{key: value for key, value in each.items() if key != "params"} for each in trainer.optimizer.param_groups]
    held["norm"] = None if trainer.norm is None else trainer.norm.clone()
    return {**held, "groups": groups, "attributes": sorted(vars(trainer.optimizer))}


def _scaler(trainer: Trainer) -> LossScaler:
    assert trainer.scaler is not None
    return trainer.scaler


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(kind: str, clip: float | None) -> None:
    trainer = _trainer(OPTIMIZERS[kind], clip)
    for step in range(2):
        trainer.step(_batch(step))
    assert _scaler(trainer).value == 2.0**11
    before = _held(trainer)
    _overflow(trainer)
    after = _held(trainer)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key]
        assert same, key
    assert (trainer.steps, trainer.skipped, _scaler(trainer).value) == (3, 1, 2.0**10)
    trainer.step(_batch(2))
    changed = _held(trainer)
    assert all(not torch.equal(before[name], changed[name]) for name, _ in trainer.optimized())
    assert trainer.skipped == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_first_step_that_is_skipped_makes_no_state(kind: str) -> None:
    trainer = _trainer(OPTIMIZERS[kind])
    before = _held(trainer)
    _overflow(trainer)
    after = _held(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name, _ in trainer.optimized())
    assert trainer.norm is None
    trainer.step(_batch(0))
    assert all(torch.isfinite(each).all() for each in _held(trainer).values() if isinstance(each, torch.Tensor))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_without_the_skipped_steps(kind: str) -> None:
    """Also where some come at once, and the first step is one of them."""

    def trained(overflows: set[int]) -> tuple[list[float], dict[str, Any]]:
        trainer = _trainer(OPTIMIZERS[kind], interval=1000)
        losses = []
        for step in range(5):
            if step in overflows:
                _overflow(trainer)
                _scaler(trainer).value *= 2
                trainer.steps -= 1
            losses.append(float(trainer.step(_batch(step))))
        assert trainer.skipped == len(overflows)
        return losses, _held(trainer)

    losses, held = trained({0, 2, 3})
    expected = trained(set())
    assert losses == expected[0]
    for key, value in expected[1].items():
        same = torch.equal(value, held[key]) if isinstance(value, torch.Tensor) else value == held[key]
        assert same, key


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_who_reads_whether_gradients_overflowed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(OPTIMIZERS[kind])
    trainer.step(_batch(0))
    reads = []

    def read(scaler: LossScaler) -> bool:
        reads.append(scaler)
        return not bool(scaler.overflow)

    monkeypatch.setattr(LossScaler, "is_finite", property(read))
    trainer.step(_batch(1))
    _overflow(trainer)
    assert len(reads) == (0 if kind in ON_DEVICE else 2)
    assert trainer.skipped == 1


def test_the_scheduler_goes_on() -> None:
    """It counts steps that are skipped, as trainer.steps does."""
    trainer = _trainer(ON_DEVICE["adamw"])
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
    for step in range(3):
        (_overflow if step == 1 else lambda trainer: trainer.step(_batch(0)))(trainer)
        scheduler.step()
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-2 / 8
    assert (trainer.steps, trainer.skipped) == (3, 1)
    assert all(float(state["step"]) == 2 for state in trainer.optimizer.state.values())


def test_the_state_comes_back() -> None:
    trainer = _trainer(ON_DEVICE["adamw"], interval=3)
    for step in range(2):
        trainer.step(_batch(step))
    _overflow(trainer)
    trainer.step(_batch(2))
    state = trainer.state_dict()
    assert state["scaler"] == {"scale": 2.0**9, "good_steps": 1}
    assert state["skipped"] == 1
    other = _trainer(ON_DEVICE["adamw"], interval=3)
    other.load_state_dict(state)
    for each in (trainer, other):
        each.step(_batch(3))
        _overflow(each)
    assert (other.skipped, other.steps, _scaler(other).state_dict()) == (2, 6, _scaler(trainer).state_dict())
    assert all(torch.equal(*pair) for pair in zip(trainer.model.parameters(), other.model.parameters(), strict=True))


def test_hooks_of_the_user_do_not_run_in_a_skipped_step() -> None:
    trainer = _trainer(ON_DEVICE["adamw"])
    trainer.step(_batch(0))
    runs = []
    trainer.optimizer.register_step_post_hook(lambda *_: runs.append(1))
    _overflow(trainer)
    assert (len(runs), trainer.skipped) == (0, 1)
    trainer.step(_batch(1))
    assert len(runs) == 1


def test_what_cannot_be_skipped() -> None:
    weight = nn.Parameter(torch.ones(4, 3, device=Device.name))
    here, elsewhere = weight.device, torch.device("meta")

    def optimizer(kind: str, parameter: nn.Parameter = weight) -> torch.optim.Optimizer:
        made = OPTIMIZERS[kind]([parameter])
        parameter.grad = torch.ones_like(parameter)
        made.step()
        return made

    assert all(can_be_skipped(optimizer(kind), here) for kind in ON_DEVICE)
    assert not any(can_be_skipped(optimizer(kind), here) for kind in WAITING)
    assert not can_be_skipped(optimizer("adamw"), elsewhere)
    assert not can_be_skipped(ON_DEVICE["adamw"]([weight]), here)  # it has no state yet
    assert not can_be_skipped(optimizer("adamw", nn.Parameter(torch.ones(4, 3, device=Device.name).t())), here)
    wrapped = optimizer("adamw")
    wrapped.step = wrapped.step  # type: ignore[method-assign]  # what it does beside is not known
    assert not can_be_skipped(wrapped, here)
