"""Copies that the optimizer updates in place of parameters: user code sees the same as without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel import master_weights
from unisono.parallel.apply import parallelize
from unisono.parallel.trainer import Trainer
from unisono.train.checkpoint.checkpoints import Checkpoints

Pools = Callable[[str, int], RankPool]
KAHAN = "bf16,master=none,rounding=kahan"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.a(x)))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=draw), torch.randn(8, 4, generator=draw)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs.float(), targets)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def trainer_of(
    plan: str = "dp=1", precision: str = "bf16", is_half: bool = True, optimizer: Any = adam, seed: int = 3
) -> Trainer:
    dtype = torch.bfloat16 if is_half else None
    return parallelize(Net, plan, loss=loss, optimizer=optimizer, precision=precision, seed=seed, dtype=dtype)


def run_backward(trainer: Trainer, seed: int) -> None:
    inputs, targets = batch(seed)
    loss(trainer.model(inputs), targets).backward()


def require_equal(one: Trainer, other: Trainer) -> None:
    for (name, mine), (_, theirs) in zip(one.optimized(), other.optimized(), strict=True):
        assert torch.equal(mine, theirs), name


# ---- gradients -------------------------------------------------------------------------------------------------------


def forgets_gradients(comm: Communicator, plan: str, is_half: bool) -> None:
    """A batch whose gradients are cleared has no effect on the step after it."""
    skipping, plain = trainer_of(plan, is_half=is_half), trainer_of(plan, is_half=is_half)
    run_backward(skipping, 0)
    skipping.optimizer.zero_grad()
    if plan != "dp=1":
        with skipping.no_sync():
            run_backward(skipping, 5)
        skipping.optimizer.zero_grad()
    for trainer in (skipping, plain):
        run_backward(trainer, 1)
        trainer.optimizer.step()
    require_equal(skipping, plain)
    run_backward(skipping, 2)
    skipping.step(batch(3))
    plain.step(batch(3))
    require_equal(skipping, plain)


@pytest.mark.parametrize(
    ("plan", "is_half"), [("dp=1", True), ("dp=2", True), ("dp=2,zero=1", False), ("dp=2,zero=3", False)]
)
def test_cleared_gradients_have_no_effect(pools: Pools, plan: str, is_half: bool) -> None:
    pools("gloo", 1 if plan == "dp=1" else 2).run(forgets_gradients, plan, is_half)


# ---- values ----------------------------------------------------------------------------------------------------------


def changes_parameters(comm: Communicator, plan: str, is_half: bool) -> None:
    """In-place changes of the model's parameters stay, and other elements keep their float32 values."""
    trainer = trainer_of(plan, is_half=is_half)
    trainer.step(batch(0))
    before = trainer.state_dict()["model"]["a.weight"]
    with torch.no_grad():
        trainer.model.a.weight.clamp_(-0.25, 0.25)  # type: ignore[operator, union-attr]
    after = trainer.state_dict()["model"]["a.weight"]
    torch.testing.assert_close(after, before.clamp(-0.25, 0.25), rtol=0, atol=0)
    assert not torch.equal(before, after)
    if "zero=3" not in plan:
        trainer.model.load_state_dict({name: torch.full_like(p, 0.5) for name, p in Net().state_dict().items()})
        trainer.step(batch(1))
        assert (trainer.state_dict()["model"]["a.weight"] - 0.5).abs().max() < 0.02
        assert (trainer.model.a.weight.float() - 0.5).abs().max() < 0.02  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(("plan", "is_half"), [("dp=2", True), ("dp=2,zero=1", False), ("dp=2,zero=3", True)])
def test_changes_of_parameters_are_kept(pools: Pools, plan: str, is_half: bool) -> None:
    pools("gloo", 2).run(changes_parameters, plan, is_half)


def has_hooks(comm: Communicator) -> None:
    trainer = trainer_of()

    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.clamp_(-0.125, 0.125)

    trainer.optimizer.register_step_post_hook(clamp)
    trainer.step(batch(0))
    assert max(float(each.detach().abs().max()) for each in trainer.model.parameters()) == 0.125
    other = trainer_of()

    def halve(*_: Any) -> None:
        with torch.no_grad():
            other.model.a.weight.mul_(0.5)  # type: ignore[operator, union-attr]

    other.optimizer.register_step_post_hook(halve)
    with pytest.raises(UsageError, match=r"a.weight was changed during the optimizer's step, by a step hook"):
        other.step(batch(0))


def test_step_hooks_run_before_parameters_are_published(pools: Pools) -> None:
    pools("gloo", 1).run(has_hooks)


# ---- weights of a float32 model that ZeRO rounds -------------------------------------------------------------------


class HeadInFloat32(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.a(x))
        with torch.autocast("cpu", enabled=False):
            return self.b(hidden.float())


class Evaluated(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if self.training else y * self.b.weight.square().sum()


class Mixing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - y.mean(0)


def mixes_samples(comm: Communicator, plan: str) -> None:
    """Found on the first batch, also where weights are rounded."""
    for run in (lambda trainer: trainer.step(batch(0)), lambda trainer: trainer.model(batch(0)[0])):
        trainer = parallelize(Mixing, plan, loss=loss, optimizer=adam, precision="bf16", seed=3)
        with pytest.raises(UsageError, match="samples"):
            run(trainer)


def test_models_that_mix_samples_are_refused(pools: Pools) -> None:
    pools("gloo", 2).run(mixes_samples, "dp=2,zero=1")


def outside_training(comm: Communicator, plan: str) -> None:
    def of(model: type[nn.Module], precision: str) -> Trainer:
        return parallelize(model, plan, loss=loss, optimizer=adam, precision=precision, seed=3)

    trainer = of(Net, "bf16")
    trainer.step(batch(0))
    with pytest.raises(
        UsageError, match=r"model.state_dict\(\) would have a.weight in bf16, .* use trainer.state_dict"
    ):
        trainer.model.state_dict()
    with pytest.raises(UsageError, match=r"a copy of the model would have a.weight in bf16, .*gather=fp32"):
        torch.optim.swa_utils.AveragedModel(trainer.model)
    with pytest.raises(UsageError, match=r"a \(Linear\) was called outside torch.autocast, but ZeRO .*gather=fp32"):
        trainer.model.a(batch(0)[0])  # type: ignore[operator]
    if "zero=3" not in plan:  # where parameters are shards
        exact = Net().state_dict()
        trainer.model.load_state_dict(exact)
        assert torch.equal(trainer.state_dict()["model"]["a.weight"], exact["a.weight"])
    with pytest.raises(UsageError, match=r"b \(Linear\) was called outside torch.autocast"):
        of(HeadInFloat32, "bf16").step(batch(0))
    evaluated = of(Evaluated, "bf16")
    evaluated.step(batch(0))
    with pytest.raises(UsageError, match=r"reads b.weight"):
        evaluated.evaluate(batch(0))
    if "zero=3" not in plan:
        for model in (HeadInFloat32, Evaluated):
            other = of(model, "bf16,gather=fp32")
            other.step(batch(0))
            other.evaluate(batch(0))
            torch.optim.swa_utils.AveragedModel(other.model)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3"])
def test_rounded_weights_outside_training(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(outside_training, plan)


# ---- optimizers of the user's own ------------------------------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """Counts steps in its group and in an attribute, and makes its state when it is built."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2, "t": 0})
        self.count = 0
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["m"] = torch.full_like(parameter, 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["t"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter]["m"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                    parameter.sub_(group["lr"] * mean / (1 - 0.9 ** group["t"]))


class Derived(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def own_optimizers(comm: Communicator) -> None:
    together = trainer_of(precision=KAHAN, optimizer=Counting)
    together.step(batch(0))
    together.step(batch(1))
    at_once, master_weights.AT_ONCE = master_weights.AT_ONCE, 16
    try:
        chunked = trainer_of(precision=KAHAN, optimizer=Counting)
        chunked.step(batch(0))
        chunked.step(batch(1))
        derived = trainer_of(precision="bf16,master=none", optimizer=lambda p: Derived(p, lr=1e-2))
        run_backward(derived, 0)
        derived.optimizer.step()
    finally:
        master_weights.AT_ONCE = at_once
    assert isinstance(chunked.optimizer, Counting)
    assert (chunked.optimizer.param_groups[0]["t"], chunked.optimizer.count) == (2, 2)
    require_equal(together, chunked)
    assert derived.steps == 1
    plain = trainer_of(optimizer=lambda p: Derived(p, lr=1e-2))
    run_backward(plain, 0)
    plain.optimizer.step()
    assert plain.steps == 1
    masters = trainer_of(optimizer=Counting)
    assert {state["m"].dtype for state in masters.optimizer.state.values()} == {torch.float32}
    masters.step(batch(0))


def adds_a_group(comm: Communicator, plan: str, is_half: bool) -> None:
    """Parameters that an optimizer is given later are trained, too."""
    two = trainer_of(
        plan, is_half=is_half, optimizer=lambda p: torch.optim.SGD([{"params": p[2:]}, {"params": p[:2]}], 0.1)
    )
    later = trainer_of(plan, is_half=is_half, optimizer=lambda p: torch.optim.SGD(p[2:], 0.1))
    later.optimizer.add_param_group({"params": later.model.a.parameters()})  # type: ignore[union-attr]
    for trainer in (two, later):
        trainer.step(batch(0))
    require_equal(two, later)
    run_backward(later, 1)
    for trainer in (two, later):
        trainer.optimizer.zero_grad()
        run_backward(trainer, 2)
        trainer.optimizer.step()
    require_equal(two, later)


@pytest.mark.parametrize(("plan", "is_half"), [("dp=2", True), ("dp=2,zero=1", False), ("dp=2,zero=3", True)])
def test_groups_that_are_added_later(pools: Pools, plan: str, is_half: bool) -> None:
    pools("gloo", 2).run(adds_a_group, plan, is_half)


def test_optimizers_of_ones_own(pools: Pools) -> None:
    pools("gloo", 1).run(own_optimizers)


# ---- states of other precisions --------------------------------------------------------------------------------------


def other_precisions(comm: Communicator, folder: Path) -> None:
    kahan = trainer_of(precision=KAHAN, optimizer=sgd)
    for step in range(3):
        kahan.step(batch(step))
    state = kahan.state_dict()
    remainder = state["optimizer"]["state"]["a.weight"]["remainder"].float()
    exact = state["model"]["a.weight"].float() + remainder
    assert remainder.any()
    Checkpoints(folder / "kahan").save(kahan, 3)
    loaded, restored = trainer_of(optimizer=sgd), trainer_of(optimizer=sgd)
    loaded.load_state_dict(state)
    Checkpoints(folder / "kahan").load(restored)
    for trainer in (loaded, restored):
        copy = dict(trainer.optimized())["a.weight"]
        assert torch.equal(copy, exact)
        assert {key: value.dtype for key, value in trainer.optimizer.state[copy].items()} == {
            "momentum_buffer": torch.float32
        }
        trainer.step(batch(4))
    again = trainer_of(precision=KAHAN, optimizer=sgd)
    again.load_state_dict(state)
    again.step(batch(3))
    kahan.step(batch(3))
    require_equal(again, kahan)

    stochastic = trainer_of(precision="bf16,master=none")
    stochastic.step(batch(0))
    Checkpoints(folder / "seed").save(stochastic, 1)
    resumed = trainer_of(precision="bf16,master=none", seed=4)
    Checkpoints(folder / "seed").load(resumed)
    stochastic.step(batch(1))
    resumed.step(batch(1))
    require_equal(stochastic, resumed)


def test_states_of_other_precisions(pools: Pools, tmp_path: Path) -> None:
    pools("gloo", 1).run(other_precisions, tmp_path)
