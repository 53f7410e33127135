"""Optimizers: how much of a model one must see to update an element as one device would, and its fused step.

    element   SGD, Adam, ...: the element, its gradient and its state. A parameter may be sharded along any dim.
    tensor    Adafactor, Muon, ...: statistics or products over the parameter. It must be seen in full.
    model     LBFGS, ...: directions and norms over all parameters. Every rank must see all of them, in full.

torch's own optimizers are known. For any other, `is_elementwise = True` on its class is trusted; otherwise it is tried
out: two parameters, of which the second gets different gradients in two runs. If that changes the first, its scope is
the model. If not, parameters of several shapes are given to it in full and in slices: if every element is updated
alike, a parameter may be sharded; if not, it is kept in full.

Step hooks (`register_step_pre_hook`, `register_step_post_hook`) run on the tensors that the optimizer holds, so they
would see shards. A hook that treats elements independently may declare `hook.is_elementwise = True`. Others are refused
where ranks hold shards.

On CPUs torch runs AdamW as a loop over parameters of a dozen operations each, unless `fused=True` is set: then as one
pass over all, in less than half the time, with the same result up to rounding. `fused` sets it for a step, unless the
user passed `foreach=` or `fused=`.

Fused steps can also be skipped by a number on the device, so that the host need not know whether gradients have
overflowed: `can_be_skipped`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.mesh.named_groups import NamedParameters
from unisono.torch_compat import global_optimizer_post_hooks, global_optimizer_pre_hooks

Make = Callable[[Any], Optimizer]
Split = Callable[[torch.Tensor], Sequence[torch.Tensor]]

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


class OptimizerScope(IntEnum):
    ELEMENT = 1
    TENSOR = 2
    MODEL = 3


def optimizer_scope(optimizer: Optimizer, make: Make) -> OptimizerScope:
    """`make(parameters)` builds another optimizer of the same kind, for optimizers that must be tried out."""
    is_changed = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if (type(optimizer) in ELEMENTWISE and not is_changed) or getattr(optimizer, "is_elementwise", False):
        return OptimizerScope.ELEMENT
    if type(optimizer) in BY_TENSOR:
        return OptimizerScope.TENSOR
    if isinstance(optimizer, torch.optim.LBFGS):
        return OptimizerScope.MODEL
    return _tried(optimizer, make)


def _tried(optimizer: Optimizer, make: Make) -> OptimizerScope:
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
        return OptimizerScope.MODEL
    return OptimizerScope.ELEMENT if all(_is_same_in_slices(make, *case) for case in _CASES) else OptimizerScope.TENSOR


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
    make: Make,
    shape: tuple[int, ...],
    steps: int,
    scale: float,
    split: Split,
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        full = torch.randn(shape, generator=draw, dtype=torch.float64)
        parameters = [nn.Parameter(part.clone()) for part in split(full)]
        optimizer = make(NamedParameters(parameters))
        for _ in range(steps):
            gradient = scale * torch.randn(shape, generator=draw, dtype=torch.float64)
            for parameter, part in zip(parameters, split(gradient), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def require_elementwise_hooks(optimizer: Optimizer) -> None:
    """Refuse step hooks that may look at more than single elements: they would see this rank's shards."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everywhere = (global_optimizer_pre_hooks, global_optimizer_post_hooks)
    hooks = [hook for held in own for hook in held.values() if not getattr(hook, "is_elementwise", False)]
    for hook in (*hooks, *(hook for held in everywhere for hook in held.values())):
        if is_unisonos(hook):
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
    are_ours = [is_unisonos(hook) for hook in hooks.values()]
    if are_ours != sorted(are_ours):
        for key in [key for key, is_ours in zip(hooks, are_ours, strict=True) if is_ours]:
            hooks.move_to_end(key)


def is_unisonos(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "unisono"


def _first_of_two(make: Make, seed: int, other: int) -> torch.Tensor:
    """The first of two parameters after three steps, of which the second has gradients drawn from `other`."""
    draw, draw_other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(other)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        pair = [nn.Parameter(torch.randn(6, 4, generator=draw, dtype=torch.float64)) for _ in range(2)]
        optimizer = make(NamedParameters(pair))
        for _ in range(3):
            pair[0].grad = torch.randn(6, 4, generator=draw, dtype=torch.float64)
            pair[1].grad = torch.randn(6, 4, generator=draw_other, dtype=torch.float64)
            optimizer.step()
    return pair[0].detach()


# ---- fused steps -----------------------------------------------------------------------------------------------------

_FUSED_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_FUSED_DTYPES = (torch.float32, torch.float64)
COMPUTES_IN_PARTS = "unisono_computes_in_parts"  # on an optimizer whose step is several, over copies of its parameters


@contextlib.contextmanager
def fused(optimizer: Optimizer, unless: torch.Tensor | None = None, *, on_gpus: bool = False) -> Iterator[None]:
    """In the block, parameter groups that torch can update in one pass are; the user's settings are restored
    afterwards.

    unless: a step of an optimizer that `can_be_skipped` changes nothing, also no count of steps, where this is 1.
    on_gpus: also parameters on GPUs. Steps that are skipped by a number are; so are those beside them, or a run that
    goes on from a checkpoint, whose first step is one of these, would be off by rounding."""
    chosen = [group for group in optimizer.param_groups if _can_be_fused(optimizer, group, on_gpus)]
    for group in chosen:
        group["fused"] = True
    if on_gpus:
        _count_on_device(optimizer)
    if unless is not None:
        optimizer.found_inf = unless  # type: ignore[attr-defined]  # where torch's GradScaler puts it, too
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None
        if unless is not None:
            del optimizer.found_inf  # type: ignore[attr-defined]


def can_be_skipped(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a step with the gradients that are there can be fused for all of them, which are on this device, and does
    nothing else.

    Not the first step of a parameter, which makes its state: torch's fused SGD then leaves it without values."""
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return False
    held = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everywhere = (global_optimizer_pre_hooks, global_optimizer_post_hooks)
    if not all(is_unisonos(hook) for hooks in (*held, *everywhere) for hook in hooks.values()):
        return False
    for group in optimizer.param_groups:
        is_chosen = group.get("fused") and type(optimizer) in _FUSED_KINDS and _are_plain(group, on_gpus=True)
        if not (is_chosen or _can_be_fused(optimizer, group, on_gpus=True)):
            return False
        for each in group["params"]:
            if each.grad is not None and not (each.device == device and _has_state(optimizer, group, each)):
                return False
    return True


def _has_state(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> bool:
    state = optimizer.state.get(parameter, {})
    if isinstance(optimizer, torch.optim.SGD):
        return not group["momentum"] or state.get("momentum_buffer") is not None
    return isinstance(state.get("step"), torch.Tensor) and state["step"].dtype == torch.float32


def _count_on_device(optimizer: Optimizer) -> None:
    """Fused steps take the count of steps from where the parameter is; after others it is on the host."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            count = optimizer.state.get(parameter, {}).get("step")
            if isinstance(count, torch.Tensor) and count.device != parameter.device:
                optimizer.state[parameter]["step"] = count.to(parameter.device, non_blocking=True)


def _can_be_fused(optimizer: Optimizer, group: dict[str, Any], on_gpus: bool) -> bool:
    if type(optimizer) not in _FUSED_KINDS or getattr(optimizer, COMPUTES_IN_PARTS, False):
        return False
    if "fused" not in group or group["fused"] is not None or group.get("foreach") is not None:
        return False
    if group.get("differentiable") or group.get("capturable"):
        return False
    if any(isinstance(beta, torch.Tensor) for beta in group.get("betas", ())):
        return False
    return _are_plain(group, on_gpus)


def _are_plain(group: dict[str, Any], on_gpus: bool) -> bool:
    return all(_is_plain(parameter, on_gpus) for parameter in group["params"] if parameter.grad is not None)


def _is_plain(parameter: torch.Tensor, on_gpus: bool) -> bool:
    """torch's fused kernels go through memory in its order and ignore strides."""
    gradient = parameter.grad
    assert gradient is not None
    return (
        (parameter.is_cpu or (on_gpus and parameter.is_cuda))
        and parameter.dtype in _FUSED_DTYPES
        and gradient.dtype == parameter.dtype
        and type(gradient) is torch.Tensor
        and gradient.layout == torch.strided
        and parameter.is_contiguous()
        and gradient.is_contiguous()
    )


def load_param_groups(optimizer: Optimizer, names: Iterable[str], state: dict[str, Any]) -> None:
    """The options of parameter groups from a state that has something for each of these parameters; UsageError where
    it has not."""
    unknown = sorted(set(names) - set(state["state"]))
    if unknown:
        raise UsageError(
            f"the optimizer state to load has nothing for {', '.join(unknown[:3])}; is it another model's?"
        )
    if len(state["param_groups"]) != len(optimizer.param_groups):
        raise UsageError(
            f"the optimizer state to load has {len(state['param_groups'])} parameter groups, "
            f"but the optimizer {len(optimizer.param_groups)}"
        )
    for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in loaded.items() if key != "params"})
