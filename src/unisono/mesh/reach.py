"""The reach of an optimizer: how much of a model it must see to update one element as one device would.

    element   SGD, Adam, ...: the element, its gradient and its state. A parameter may be cut anywhere.
    tensor    Adafactor, Muon, ...: statistics or products over the parameter. It must be seen whole.
    model     LBFGS, ...: directions and norms over all parameters. All must be seen, whole, by every rank.

torch's own optimizers are known. Of any other, `is_elementwise = True` on its class is believed, and else it is tried
out: two parameters, of which the second gets different gradients in two runs. If that changes the first, it reaches
over the model; if not, it is given whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError

Make = Callable[[Any], Optimizer]

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
BY_TENSOR: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)


class Reach(IntEnum):
    ELEMENT = 1
    TENSOR = 2
    MODEL = 3


def reach_of(optimizer: Optimizer, make: Make) -> Reach:
    """`make(parameters)` builds another optimizer of the same kind, should it have to be tried out."""
    if type(optimizer) in ELEMENTWISE or getattr(optimizer, "is_elementwise", False):
        return Reach.ELEMENT
    if type(optimizer) in BY_TENSOR:
        return Reach.TENSOR
    if isinstance(optimizer, torch.optim.LBFGS):
        return Reach.MODEL
    return _tried(optimizer, make)


def _tried(optimizer: Optimizer, make: Make) -> Reach:
    try:
        first, second, third = (_first_of_two(make, seed, other) for seed, other in ((1, 2), (1, 3), (4, 2)))
    except Exception as error:
        raise UsageError(
            f"{type(optimizer).__name__} is no optimizer of torch's, and could not be tried out on two matrices "
            f"({type(error).__name__}: {error}); if it treats elements alone, set is_elementwise = True on its class, "
            "else use zero=0, tp=1, pp=1, ep=1"
        ) from error
    if not torch.equal(first, third):
        raise UsageError(
            f"{type(optimizer).__name__} draws random numbers of its own, which would differ between ranks"
        )
    return Reach.TENSOR if torch.equal(first, second) else Reach.MODEL


def _first_of_two(make: Make, seed: int, other: int) -> torch.Tensor:
    """The first of two parameters after three steps, of which the second has gradients drawn from `other`."""
    draw, draw_other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(other)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        pair = [nn.Parameter(torch.randn(6, 4, generator=draw, dtype=torch.float64)) for _ in range(2)]
        optimizer = make(pair)
        for _ in range(3):
            pair[0].grad = torch.randn(6, 4, generator=draw, dtype=torch.float64)
            pair[1].grad = torch.randn(6, 4, generator=draw_other, dtype=torch.float64)
            optimizer.step()
    return pair[0].detach()
