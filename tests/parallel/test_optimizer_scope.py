"""Every optimizer of torch, and some that are not, under ZeRO: as one process, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from tests.parallel import replicas
from tests.parallel.test_zero import trained_with
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.apply import parallelize
from unisono.parallel.checks.optimizer_scope import (
    BY_TENSOR,
    ELEMENTWISE,
    OptimizerScope,
    optimizer_scope,
    require_full_parameters,
)
from unisono.parallel.layout import Layout, Split, set_layout
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)


def test_every_class_of_torch_is_known_and_trained() -> None:
    """A class that a new torch brings must be looked at: which reach has it?"""
    classes = {each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, Optimizer)}
    assert classes - {Optimizer} == {*ELEMENTWISE, *BY_TENSOR, *REFUSED}
    model = replicas.net()
    trained = {type(make(list(model.parameters()))) for make in replicas.optimizers().values()}
    assert trained == {*ELEMENTWISE, *BY_TENSOR}  # by test_zero.test_every_optimizer, in stages 1 and 3


class Lars(Optimizer):
    """Steps as long as the parameter's norm: it looks at tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.chosen():
            parameter -= 0.01 * self.length(parameter) * parameter.grad

    def length(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.norm() / (parameter.grad.norm() + 1e-9)

    def chosen(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class GlobalLars(Lars):
    """As long as the norm of all gradients: it looks at the model."""

    def length(self, parameter: torch.Tensor) -> torch.Tensor:
        return 1 / sum(p.grad.norm() for p in self.chosen())


class Noisy(Lars):
    def length(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.rand(())


class Signs(Lars):
    is_elementwise = True

    def length(self, parameter: torch.Tensor) -> torch.Tensor:
        return 1 / (parameter.grad.abs() + 1)


class Lion(Lars):
    """Does not say that it treats elements alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.chosen():
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            parameter.mul_(1 - 0.01 * 0.1).sub_(0.01 * (0.9 * moment + 0.1 * parameter.grad).sign())
            moment.lerp_(parameter.grad, 0.01)


class Limited(Lars):
    """Limits the length of large updates only."""

    def length(self, parameter: torch.Tensor) -> torch.Tensor:
        return 1 / parameter.grad.norm().clamp_min(100.0)


class ByRows(Lars):
    def length(self, parameter: torch.Tensor) -> torch.Tensor:
        return 1 / parameter.grad.norm(dim=-1, keepdim=True)


def clamped(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.2, 0.2)


def by_norm(optimizer: Optimizer, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.01)


def hooked(hook: Callable[..., None], is_elementwise: bool) -> Callable[[Any], Optimizer]:
    def make(parameters: Any) -> Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def called(*args: Any) -> None:
            hook(*args)

        called.is_elementwise = is_elementwise  # type: ignore[attr-defined]
        before = hook is by_norm
        (optimizer.register_step_pre_hook if before else optimizer.register_step_post_hook)(called)
        return optimizer

    return make


def test_unknown_optimizers_are_tried_out() -> None:
    pair = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    assert optimizer_scope(Lars(pair), Lars) is OptimizerScope.TENSOR
    assert optimizer_scope(GlobalLars(pair), GlobalLars) is OptimizerScope.MODEL
    assert optimizer_scope(Signs(pair), Signs) is OptimizerScope.ELEMENT
    assert optimizer_scope(Lion(pair), Lion) is OptimizerScope.ELEMENT
    assert optimizer_scope(Limited(pair), Limited) is OptimizerScope.TENSOR
    assert optimizer_scope(ByRows(pair), ByRows) is OptimizerScope.TENSOR
    with pytest.raises(UsageError, match="Noisy draws random numbers"):
        optimizer_scope(Noisy(pair), Noisy)
    picky = lambda parameters: Lars([{"params": parameters[:1]}, {"params": [parameters[7]]}])  # noqa: E731
    with pytest.raises(UsageError, match=r"could not be tried out on two matrices .IndexError"):
        optimizer_scope(Lars(pair), picky)


def test_what_is_split_is_refused_to_those_that_look_at_more() -> None:
    model = nn.Linear(4, 4)
    for make in (torch.optim.LBFGS, GlobalLars):
        assert require_full_parameters(make(model.parameters()), make, model, is_sharded=False)
        with pytest.raises(UsageError, match="looks at all parameters at once, but ZeRO or a pipeline"):
            require_full_parameters(make(model.parameters()), make, model, is_sharded=True)
    set_layout(model.weight, Layout((Split.even(("tp",), 0, 8, 2),)))
    for make in (torch.optim.Adafactor, Lars):
        with pytest.raises(UsageError, match="as one tensor, but weight is sharded by tp or ep"):
            require_full_parameters(make(model.parameters()), make, model, is_sharded=False)
    with pytest.raises(UsageError, match="all parameters at once, but weight is sharded"):
        require_full_parameters(torch.optim.LBFGS(model.parameters()), torch.optim.LBFGS, model, is_sharded=False)
    with pytest.raises(UsageError, match="SparseAdam takes sparse gradients"):
        require_full_parameters(
            torch.optim.SparseAdam(model.parameters()), torch.optim.SparseAdam, model, is_sharded=True
        )
    for make in (Signs, torch.optim.SGD):
        assert require_full_parameters(make(model.parameters()), make, model, is_sharded=True) is OptimizerScope.ELEMENT


def with_unknown_optimizer(comm: Communicator, stage: int) -> None:
    for make in (Lars, Signs):
        trained_with(Mesh((comm.size,), ("dp",)), make, stage, 5)


@pytest.mark.parametrize("stage", [1, 3])
def test_unknown_optimizers_under_zero(pools: Pools, stage: int) -> None:
    pools("gloo", 2).run(with_unknown_optimizer, stage)


# ---- step hooks, and unknown optimizers under tp ---------------------------------------------------------------


def came(comm: Communicator, make: Any, plan: str) -> str:
    """ "" where the plan is equivalent, else why not."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        return torch.randn(4, 6, generator=drawn), torch.randn(4, 4, generator=drawn)

    try:
        verdict = verify_here(comm, Task(build, F.mse_loss, make, batch, rules=RULES), Plan.parse(plan), 2)
    except UsageError as error:
        return str(error)
    return "" if verdict.equivalent else str(verdict)


RULES = {"0": "column", "2": "row"}


def check_hooks(comm: Communicator) -> dict[tuple[str, str], str]:
    makers = {
        "Lion": Lion,
        "elementwise hook": hooked(clamped, True),
        "hook": hooked(by_norm, False),
        "Lars": Lars,
    }
    plans = ("tp=2", "dp=2,zero=1", "dp=2,zero=3", "dp=2")
    return {(name, plan): came(comm, make, plan) for name, make in makers.items() for plan in plans}


def test_step_hooks_and_unknown_optimizers_are_right_or_refused(pools: Pools) -> None:
    for outcomes in pools("gloo", 2).run(check_hooks):
        refused = {key: reported for key, reported in outcomes.items() if reported}
        assert set(refused) == {("hook", "tp=2"), ("hook", "dp=2,zero=1"), ("hook", "dp=2,zero=3"), ("Lars", "tp=2")}
        assert "SGD has the step hook hooked.<locals>.make.<locals>.called" in refused["hook", "dp=2,zero=1"]


def check_late_hooks(comm: Communicator, plan: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    trainer = parallelize(model, plan, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), rules=RULES)
    reported = []
    for hook in (clamped, by_norm):
        clamped.is_elementwise = True  # type: ignore[attr-defined]
        trainer.optimizer.register_step_post_hook(hook)
        try:
            trainer.step((torch.ones(4, 6), torch.ones(4, 4)))
        except UsageError as error:
            reported.append(str(error))
        else:
            held = max(float(parameter.abs().max()) for parameter in model.parameters())
            reported.append(f"at most {held:.4f}")
    return reported


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=2"])
def test_hooks_that_come_later(pools: Pools, plan: str) -> None:
    for elementwise, other in pools("gloo", 2).run(check_late_hooks, plan):
        assert elementwise == "at most 0.2000"
        assert "step hook by_norm" in other
