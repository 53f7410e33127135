"""Hooks that a user has registered on modules, under tensor parallelism.

A hook is written for full tensors. On a layer that tp shards it stays registered, and is given what one device would
give it: shards are gathered for the hook, and what it returns (or has changed in place) is sharded again. Both are
autograd operations, so a hook may also keep a tensor for the loss. Backward hooks are kept where a layer's input and
output are full, and refused elsewhere.

Other modules may work on shards too, between a column and a row layer. Their hooks are refused when they are first
called there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.parallel.layout import Split
from unisono.parallel.rules.rules import Style, Styles
from unisono.parallel.tensor.custom_layers import weight_hooks
from unisono.parallel.tensor.region import Region

_DICTIONARIES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
_SHARDED_OUTPUT = ("column", "vocab_head", "column_inside")
_SHARDED_INPUT = ("row", "row_sum")


def has_hooks(module: nn.Module) -> bool:
    return bool(_pre_hooks(module) or module._forward_hooks) or _has_backward_hooks(module)


def _pre_hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_pre_hooks.values() if hook not in weight_hooks(module)]


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


# ---- what cannot be right --------------------------------------------------------------------------------------------


def require_hooks_kept(name: str, module: nn.Module, style: Style) -> None:
    """UsageError where a layer with this rule has hooks that could not be given full tensors."""
    for key, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"tp: {name}.{key} has a gradient hook (Tensor.register_hook), which would see a shard of it; "
                f'keep the layer full with the rule {{"{name}": "replicate"}}, or change gradients in an optimizer'
            )
    if style.kind in (*_SHARDED_OUTPUT, *_SHARDED_INPUT) and _has_backward_hooks(module):
        raise UsageError(
            f"tp: {name} has a backward hook, and the rule {style} gives it a shard of the gradients; keep it full "
            f'with the rule {{"{name}": "replicate"}}, or remove the hook'
        )


def require_no_hooks_in_blocks(path: str, model: nn.Module) -> None:
    """Under sequence parallelism every module of a block sees a part of the sequence."""
    for name, module in model.named_modules():
        if f"{name}.".startswith(f"{path}.") and has_hooks(module):
            raise UsageError(
                f"sp gives {name} a part of the sequence, but it has a hook, which is written for all of it; remove "
                "the hook, or leave sp out"
            )


# ---- hooks of sharded layers -----------------------------------------------------------------------------------------


def carry_hooks(module: nn.Module, layer: nn.Module) -> None:
    """Let the layer that replaces a module have its hooks; handles of the hooks stay valid."""
    for name in _DICTIONARIES:
        theirs, ours = getattr(module, name), getattr(layer, name)
        if theirs and isinstance(theirs, dict):
            theirs.update(ours)
            setattr(layer, name, theirs)
        elif name == "_is_full_backward_hook":
            setattr(layer, name, theirs)


def show_full_tensors(layer: nn.Module, style: Style, split: Split, region: Region) -> None:
    """Give the forward hooks of a sharded layer full inputs and outputs."""
    shards = _Shards(split, region)
    if style.kind in _SHARDED_OUTPUT:
        for key, hook in layer._forward_hooks.items():
            layer._forward_hooks[key] = _given_full_output(hook, shards)
    elif style.kind in _SHARDED_INPUT:
        for key, hook in layer._forward_hooks.items():
            layer._forward_hooks[key] = _given_full_input(hook, shards)
        for key, hook in layer._forward_pre_hooks.items():
            if hook not in weight_hooks(layer):
                with_kwargs = key in layer._forward_pre_hooks_with_kwargs
                layer._forward_pre_hooks[key] = _before_given_full_input(hook, shards, with_kwargs)


class _Shards:
    """Features along the last dim."""

    def __init__(self, split: Split, region: Region) -> None:
        self.comm = region.comm
        self.lengths = [len(held) for held in split.held]
        order = [index for held in split.held for index in held]
        self.is_in_order = order == sorted(order)
        self.order = torch.tensor(order)

    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        full = autograd_collectives.gather(shard, -1, self.lengths, self.comm)
        return full if self.is_in_order else full.index_select(-1, self.order.argsort().to(full.device))

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        ordered = full if self.is_in_order else full.index_select(-1, self.order.to(full.device))
        return autograd_collectives.split(ordered, -1, self.lengths, self.comm)


def _given_full_output(hook: Callable[..., Any], shards: _Shards) -> Callable[..., Any]:
    def called(module: nn.Module, *given: Any) -> Any:
        *args, output = given
        full = shards.gathered(output)
        version = full._version
        result = hook(module, *args, full)
        if result is None and full._version == version:
            return None
        return shards.shard(full if result is None else result)

    return called


def _given_full_input(hook: Callable[..., Any], shards: _Shards) -> Callable[..., Any]:
    def called(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        return hook(module, tuple(map(shards.gathered, args)), *rest)

    return called


def _before_given_full_input(hook: Callable[..., Any], shards: _Shards, with_kwargs: bool) -> Callable[..., Any]:
    def called(module: nn.Module, args: tuple[Any, ...], *kwargs: Any) -> Any:
        full = tuple(map(shards.gathered, args))
        versions = [each._version for each in full]
        result = hook(module, full, *kwargs)
        if result is None:
            if versions == [each._version for each in full]:
                return None
            result = (full, *kwargs) if with_kwargs else full
        if with_kwargs:
            return tuple(map(shards.shard, result[0])), result[1]
        return tuple(map(shards.shard, result if isinstance(result, tuple) else (result,)))

    return called


# ---- hooks of other modules ------------------------------------------------------------------------------------------


def guard_hooks(model: nn.Module, styles: Styles, region_of: Callable[[str], Region]) -> None:
    """Refuse hooks of modules that are not sharded when they are called between a column and a row layer."""
    guarded: list[Region] = []
    for name, module in model.named_modules():
        style = styles.get(name)
        if has_hooks(module) and (style is None or style.kind in ("replicate", "summed")):
            region = region_of(name)
            guarded.append(region)
            guard = _guard(name, region)
            if _pre_hooks(module) or _has_backward_hooks(module):
                module.register_forward_pre_hook(guard, prepend=True)
            if module._forward_hooks or _has_backward_hooks(module):
                module.register_forward_hook(guard, prepend=True)
    if guarded:
        model.register_forward_pre_hook(_beginning(guarded), prepend=True)


def _beginning(regions: list[Region]) -> Callable[..., None]:
    def begin(*_: Any) -> None:
        for region in regions:
            region.is_inside = False  # also after a forward pass that has failed

    return begin


def _guard(name: str, region: Region) -> Callable[..., None]:
    def guard(*_: Any) -> None:
        if region.is_inside:
            raise UsageError(
                f"tp={region.comm.size}: {name} has a hook and works between a column and a row layer, where it sees a "
                "shard of the features; remove the hook, or keep the layers around it full with rules"
            )

    return guard
