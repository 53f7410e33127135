"""The reach of an optimizer: how much of a model it must see to update one element as one device would.

    element   SGD, Adam, ...: the element, its gradient and its state. A parameter may be cut anywhere.
    tensor    Adafactor, Muon, ...: statistics or products over the parameter. It must be seen whole.
    model     LBFGS, ...: directions and norms over all parameters. All must be seen, whole, by every rank.

torch's own optimizers are known. Of any other, `is_elementwise = True` on its class is believed, and else it is tried
out: two parameters, of which the second gets different gradients in two runs. If that changes the first, it reaches
over the model. If not, parameters of several shapes are given to it in full and in slices: where every element is
updated alike, a parameter may be cut, and else it is seen in full.

Step hooks (`register_step_pre_hook`, `register_step_post_hook`) run on what the optimizer has, so they would see
shards. One that treats elements alone may say so: `hook.is_elementwise = True`. Others are refused where ranks hold
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.torch_compat import global_optimizer_post_hooks, global_optimizer_pre_hooks

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
    is_changed = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if (type(optimizer) in ELEMENTWISE and not is_changed) or getattr(optimizer, "is_elementwise", False):
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
    if not torch.equal(first, second):
        return Reach.MODEL
    return Reach.ELEMENT if all(_is_same_in_slices(make, *case) for case in _CASES) else Reach.TENSOR


# Shapes, steps and scales of gradients: some optimizers treat large tensors, or tensors of some dims, in another way,
# limit large updates, or do something every tenth step.
_CASES = (((160, 144), 3, 1.0), ((6, 4), 12, 1e-3), ((6, 4), 3, 1e3), ((8,), 3, 1.0), ((6, 4, 3, 3), 3, 1.0))


def _is_same_in_slices(make: Make, shape: tuple[int, ...], steps: int, scale: float) -> bool:
    """Whether three slices of a parameter, along any dim, are updated as the parameter is."""
    try:
        full = _updated(make, shape, steps, scale, partial(torch.tensor_split, sections=1))[0]
        for dim in range(len(shape)):
            slices = _updated(make, shape, steps, scale, partial(torch.tensor_split, sections=3, dim=dim))
            if not torch.allclose(torch.cat(slices, dim), full, rtol=1e-9, atol=1e-15):
                return False
    except Exception:  # an optimizer for tensors of some shapes only
        return False
    return True


def _updated(
    make: Make, shape: tuple[int, ...], steps: int, scale: float, cut: Callable[[torch.Tensor], Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        whole = torch.randn(shape, generator=draw, dtype=torch.float64)
        parameters = [nn.Parameter(part.clone()) for part in cut(whole)]
        optimizer = make(parameters)
        for _ in range(steps):
            gradient = scale * torch.randn(shape, generator=draw, dtype=torch.float64)
            for parameter, part in zip(parameters, cut(gradient), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def require_elementwise_hooks(optimizer: Optimizer) -> None:
    """Refuse step hooks that may look at more than single elements: they would see this rank's shards."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everywhere = (global_optimizer_pre_hooks, global_optimizer_post_hooks)
    hooks = [hook for held in own for hook in held.values() if not getattr(hook, "is_elementwise", False)]
    for hook in (*hooks, *(hook for held in everywhere for hook in held.values())):
        if _is_unisonos(hook):
            continue
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise UsageError(
            f"{type(optimizer).__name__} has the step hook {name}, which would see shards of parameters and gradients; "
            "register hooks on the optimizer alone and, where they treat elements alone, set is_elementwise = True on "
            "them, else use zero=0, tp=1, pp=1, ep=1"
        )


def run_own_hooks_last(optimizer: Optimizer) -> None:
    """After a step, let unisono's hooks run after those that a user has registered later."""
    hooks: Any = optimizer._optimizer_step_post_hooks
    are_ours = [_is_unisonos(hook) for hook in hooks.values()]
    if are_ours != sorted(are_ours):
        for key in [key for key, is_ours in zip(hooks, are_ours, strict=True) if is_ours]:
            hooks.move_to_end(key)


def _is_unisonos(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "unisono"


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
