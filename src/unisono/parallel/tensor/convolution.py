"""Convolutions under tensor parallelism: output channels as the columns of a linear layer, input channels as its rows.

    column     y_r = conv(x; filters of rank r)                          its output is this rank's channels
    row        y = sum of conv(x_r; this rank's slice of each filter)    its input is this rank's channels
    channels   y_r = conv(x_r; filters of rank r)                        depthwise: both are
               y_r = norm(x_r; weight and bias of rank r)                Batch-, Instance-, GroupNorm

A layer keeps its class, and with it padding, stride and dilation: its parameters are sharded in place. The running
statistics of a BatchNorm stay full: each rank updates those of its channels and gathers the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.parallel.rules.rules import Style
from unisono.parallel.tensor.custom_layers import weight_hooks
from unisono.parallel.tensor.parameter_shards import ParameterSharder, packed
from unisono.parallel.tensor.region import Region
from unisono.torch_compat import ConvNd, NormBase

_CLASSES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.GroupNorm,
)  # fmt: skip
KINDS = ("column", "row", "channels")


def is_convolution(module: nn.Module) -> bool:
    """Whether every output channel of a convolution is made of all its input channels."""
    return _is_plain(module) and bool(module.groups == 1)


def is_depthwise(module: nn.Module) -> bool:
    """Whether every channel is convolved by itself."""
    return _is_plain(module) and bool(module.groups == module.in_channels == module.out_channels)


def is_channelwise(module: nn.Module) -> bool:
    """Whether a layer works on every channel (GroupNorm: group of channels) by itself."""
    if is_depthwise(module):
        return True
    if type(module) not in _NORMS or "forward" in vars(module) or weight_hooks(module):
        return False
    return {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def _is_plain(module: nn.Module) -> bool:
    if type(module) not in _CLASSES or "forward" in vars(module) or weight_hooks(module):
        return False
    return {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def require_shardable(name: str, module: Any, style: Style, ranks: int) -> None:
    """UsageError where a rule does not fit a convolution or a norm of channels."""
    fits = is_channelwise(module) if style.kind == "channels" else is_convolution(module)
    if not fits or style.kind not in KINDS or len(style.parts) > 1 or style.dim:
        raise UsageError(
            f"the rule for {name} is {style}, but it is {_described(module)}; expected column or row for a "
            "convolution of one group, channels for a depthwise convolution, a BatchNorm, InstanceNorm or GroupNorm, "
            "and a layer whose forward is torch's own"
        )
    shared = _channels(module, style)
    if shared % ranks:
        raise UsageError(f"{name} has {shared} channels, which tp={ranks} does not divide; use a tp that does")
    if isinstance(module, nn.GroupNorm) and module.num_groups % ranks:
        raise UsageError(f"{name} has {module.num_groups} groups, which tp={ranks} does not divide; use a tp that does")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise UsageError(
            f"tp: {name} has a hook, and the rule {style} gives it a part of the channels; keep it full with the rule "
            f'{{"{name}": "replicate"}}, or remove the hook'
        )


def is_shardable(module: nn.Module) -> bool:
    """Whether this file is about it."""
    return isinstance(module, ConvNd | NormBase | nn.GroupNorm)


def _described(module: Any) -> str:
    if not isinstance(module, ConvNd):
        return f"a {type(module).__name__}"
    return (
        f"a {type(module).__name__} of {module.in_channels} to {module.out_channels} channels in {module.groups} groups"
    )


def _channels(module: Any, style: Style) -> int:
    """That ranks share."""
    if isinstance(module, ConvNd):
        return int(module.in_channels if style.kind == "row" else module.out_channels)
    return int(module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features)


def shard(module: Any, style: Style, region: Region, shards: ParameterSharder) -> None:
    """Leave the layer this rank's channels."""
    ranks = region.comm.size
    by_rows = style.kind == "row"
    channels = _channels(module, style)
    if module.weight is not None:
        module.weight = shards.shard(module.weight, packed(int(by_rows), [channels], ranks))
    if module.bias is not None and not by_rows:
        module.bias = shards.shard(module.bias, packed(0, [channels], ranks))
    if isinstance(module, nn.GroupNorm):
        module.num_channels //= ranks
        module.num_groups //= ranks
        return
    if not isinstance(module, ConvNd):
        module.forward = partial(_norm, module, region)
        return
    if style.kind != "column":
        module.in_channels //= ranks
    if not by_rows:
        module.out_channels //= ranks
    module.groups = max(module.groups // ranks, 1)
    run = {"column": _column, "row": _row}.get(style.kind)
    if run is not None:
        module.forward = partial(run, module, module.forward, region, channels)


def _column(
    module: Any, forward: Callable[..., torch.Tensor], region: Region, channels: int, x: torch.Tensor
) -> torch.Tensor:
    y = forward(region.enter(x))
    region.locate_inside([channels])
    return y


def _row(
    module: Any, forward: Callable[..., torch.Tensor], region: Region, channels: int, x: torch.Tensor
) -> torch.Tensor:
    y = region.leave(module._conv_forward(x, module.weight, None))
    return y if module.bias is None else y + module.bias.view(-1, *[1] * (module.weight.dim() - 2))


def _norm(module: Any, region: Region, x: torch.Tensor) -> torch.Tensor:
    """The forward of the module's class (which data parallelism may change) with the statistics of this rank's channels
    only. They are copies, as autograd saves them, and the module's own are written to when others' are gathered."""
    comm = region.comm
    held = module.num_features // comm.size
    named = {name: getattr(module, name) for name in ("running_mean", "running_var")}
    full = {name: each for name, each in named.items() if each is not None}
    here = {name: each[comm.rank * held :][:held].clone() for name, each in full.items()}
    local = copy.copy(module)
    del local.forward
    local.num_features = held
    vars(local).update(here)
    y: torch.Tensor = type(module).forward(local, x)
    if module.training:
        for name, each in full.items():
            comm.all_gather_into(each.view(comm.size, held), here[name])
    return y
