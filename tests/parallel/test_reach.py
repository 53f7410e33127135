"""Every optimizer of torch, and some that are not, under ZeRO: as one process, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.parallel import replicas
from tests.parallel.test_zero import trained_with
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import Layout, Split, lay
from unisono.parallel.reach import BY_TENSOR, ELEMENTWISE, Reach, reach_of, require_whole

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


def test_strangers_are_tried_out() -> None:
    pair = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    assert reach_of(Lars(pair), Lars) is Reach.TENSOR
    assert reach_of(GlobalLars(pair), GlobalLars) is Reach.MODEL
    assert reach_of(Signs(pair), Signs) is Reach.ELEMENT
    with pytest.raises(UsageError, match="Noisy draws random numbers"):
        reach_of(Noisy(pair), Noisy)
    picky = lambda parameters: Lars([{"params": parameters[:1]}, {"params": [parameters[7]]}])  # noqa: E731
    with pytest.raises(UsageError, match=r"could not be tried out on two matrices .IndexError"):
        reach_of(Lars(pair), picky)


def test_what_is_cut_is_refused_to_those_that_look_at_more() -> None:
    model = nn.Linear(4, 4)
    for make in (torch.optim.LBFGS, GlobalLars):
        assert require_whole(make(model.parameters()), make, model, is_spread=False)
        with pytest.raises(UsageError, match="looks at all parameters at once, but ZeRO or a pipeline"):
            require_whole(make(model.parameters()), make, model, is_spread=True)
    lay(model.weight, Layout((Split.even(("tp",), 0, 8, 2),)))
    for make in (torch.optim.Adafactor, Lars):
        with pytest.raises(UsageError, match="as a whole, but weight is cut by tp or ep"):
            require_whole(make(model.parameters()), make, model, is_spread=False)
    with pytest.raises(UsageError, match="all parameters at once, but weight is cut"):
        require_whole(torch.optim.LBFGS(model.parameters()), torch.optim.LBFGS, model, is_spread=False)
    with pytest.raises(UsageError, match="SparseAdam takes sparse gradients"):
        require_whole(torch.optim.SparseAdam(model.parameters()), torch.optim.SparseAdam, model, is_spread=True)
    for make in (Signs, torch.optim.SGD):
        assert require_whole(make(model.parameters()), make, model, is_spread=True) is Reach.ELEMENT


def strangers(comm: Communicator, stage: int) -> None:
    for make in (Lars, Signs):
        trained_with(Mesh((comm.size,), ("dp",)), make, stage, 5)


@pytest.mark.parametrize("stage", [1, 3])
def test_strangers_under_zero(pools: Pools, stage: int) -> None:
    pools("gloo", 2).run(strangers, stage)
