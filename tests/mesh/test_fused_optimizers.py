"""Optimizers step fused where their user left that to torch, and as the user said where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from unisono.mesh.optimizers import fused

Make = Callable[[Any], Optimizer]


def parameters(is_transposed: bool = False) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for shape in ((7, 5), (3,), ()):
        values, gradient = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
        made.append(nn.Parameter(values))
        made[-1].grad = gradient.t().contiguous().t() if is_transposed else gradient
    return made


OPEN: list[Make] = [
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
]
CHOSEN: list[Make] = [
    lambda p: torch.optim.AdamW(p, foreach=False),
    lambda p: torch.optim.AdamW(p, foreach=True),
    lambda p: torch.optim.AdamW(p, fused=False),
    lambda p: torch.optim.RMSprop(p),
    lambda p: torch.optim.AdamW(p, differentiable=True),
]


def used_in(optimizer: Optimizer) -> Any:
    with fused(optimizer):
        return optimizer.param_groups[0].get("fused")


@pytest.mark.parametrize("make", OPEN)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_result_is_the_same(make: Make, is_transposed: bool) -> None:
    ours, plain = parameters(is_transposed), parameters(is_transposed)
    optimizer, reference = make(ours), make(plain)
    assert used_in(optimizer) is (None if is_transposed else True)  # the kernel would take the wrong elements
    for _ in range(3):
        with fused(optimizer):
            optimizer.step()
        reference.step()
    assert optimizer.param_groups[0]["fused"] is None
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", CHOSEN)
def test_a_choice_is_kept(make: Make) -> None:
    optimizer = make(parameters())
    before = dict(optimizer.param_groups[0])
    assert used_in(optimizer) == before.get("fused")
    assert {key: optimizer.param_groups[0][key] for key in before} == before


def test_settings_come_back_after_an_error() -> None:
    optimizer = OPEN[0](parameters())
    with pytest.raises(ZeroDivisionError), fused(optimizer):
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["fused"] is None
