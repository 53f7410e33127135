"""A trainer's state as one process would have it: full tensors by name, so that any other plan can go on from it.

state = trainer.state_dict()          # every rank calls it, and has all of it
other.load_state_dict(state)          # of the same model, under any plan
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import full_tensors_of, layout_of, local_of
from unisono.parallel.optimizer_state import full_optimizer_state, full_shape

Tensors = dict[str, torch.Tensor]


def full_tensors_in(model: nn.Module, optimized: Tensors, mesh: Mesh) -> Tensors:
    """Parameters (what the optimizer has of them, which may be more precise) and buffers, of all stages."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **optimized}
    full_tensors = full_tensors_of(list(named.values()), [layout_of(tensor) for tensor in named.values()], mesh)
    mine = {name: tensor.clone() for name, tensor in zip(named, full_tensors, strict=True)}
    full: Tensors = {}
    for theirs in _over_stages(mine, mesh):
        full.update(theirs)
    return full


@torch.no_grad()
def load_tensors(model: nn.Module, optimized: Tensors, mesh: Mesh, full: Tensors) -> None:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **optimized}
    for name, tensor in named.items():
        if name not in full:
            raise UsageError(f"the state to load has no {name}; is it another model's?")
        if full[name].shape != full_shape(tensor):
            raise UsageError(
                f"{name} in the state to load is of shape {tuple(full[name].shape)}; expected "
                f"{tuple(full_shape(tensor))}"
            )
        tensor.copy_(local_of(full[name], layout_of(tensor), mesh))


def full_optimizer(optimizer: Optimizer, optimized: Tensors, mesh: Mesh) -> dict[str, Any]:
    """Optimizer state of all stages."""
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for theirs in _over_stages(full_optimizer_state(optimizer, optimized.items(), mesh), mesh):
        merged["state"].update(theirs["state"])
        if not merged["param_groups"]:
            merged["param_groups"] = [{**group, "params": []} for group in theirs["param_groups"]]
        for group, more in zip(merged["param_groups"], theirs["param_groups"], strict=True):
            group["params"] += [name for name in more["params"] if name not in group["params"]]
    return merged


def _over_stages(mine: Any, mesh: Mesh) -> Iterable[Any]:
    return mesh.comm("pp").all_gather_object(mine) if mesh.size("pp") > 1 else [mine]
