"""Checkpoints: files of tensors by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.compat.language import say
from unisono.compat.mindspore.common.parameter import Parameter
from unisono.compat.mindspore.mindspore_names import missing_names
from unisono.compat.mindspore.nn.cell import name_of
from unisono.errors import UsageError

__getattr__ = missing_names(__name__)


def save_checkpoint(save_obj: Any, ckpt_file_name: str, integrated_save: bool = True, async_save: bool = False) -> None:
    """Write a net's parameters, or a list of {"name": ..., "data": ...}."""
    if isinstance(save_obj, nn.Module):
        tensors = {name_of(parameter, path): parameter for path, parameter in save_obj.named_parameters()}
    else:
        tensors = {each["name"]: each["data"] for each in save_obj}
    path = Path(ckpt_file_name)
    path = path if path.suffix == ".ckpt" else path.with_name(f"{path.name}.ckpt")
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: torch.as_tensor(tensor).detach().as_subclass(torch.Tensor) for name, tensor in tensors.items()}
    torch.save(plain, path)


def load_checkpoint(ckpt_file_name: str, net: nn.Module | None = None) -> dict[str, Parameter]:
    """Parameters by name; with `net`, loaded into it too."""
    try:
        tensors = torch.load(ckpt_file_name, weights_only=True)
    except FileNotFoundError:
        raise UsageError(
            say(
                f"load_checkpoint({ckpt_file_name!r}): there is no such file",
                f"load_checkpoint({ckpt_file_name!r})：没有这个文件",
            )
        ) from None
    found = {
        name: Parameter(tensor, name, requires_grad=False)
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
    if net is not None:
        load_param_into_net(net, found)
    return found


def load_param_into_net(
    net: nn.Module, parameter_dict: dict[str, Any], strict_load: bool = False
) -> tuple[list[str], list[str]]:
    """The names of parameters that were not loaded, and of those that the net has not."""
    own = {name_of(parameter, path): parameter for path, parameter in net.named_parameters()}
    for name, parameter in own.items():
        if name not in parameter_dict:
            continue
        given = torch.as_tensor(parameter_dict[name])
        if given.shape != parameter.shape:
            raise UsageError(
                say(
                    f"{name} of the checkpoint has shape {tuple(given.shape)}, and the net's "
                    f"{tuple(parameter.shape)}; MindSpore refuses it too (of a run on many ranks, load a "
                    "checkpoint with integrated_save=True)",
                    f"检查点中 {name} 的形状为 {tuple(given.shape)}，而网络中为 {tuple(parameter.shape)}；"
                    "MindSpore 同样会报错（多进程运行的检查点须以 integrated_save=True 保存）",
                )
            )
        with torch.no_grad():
            parameter.copy_(given)
    return [name for name in own if name not in parameter_dict], [name for name in parameter_dict if name not in own]
