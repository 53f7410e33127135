"""Meta tensors and models: on torch's "meta" device, with shapes and no numbers; they take no memory and no time."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unisono.mesh.deferred_init.deferred_model import source_of, tensors_in

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def to_meta(tree: Any) -> Any:
    """The same, with meta tensors instead of its tensors."""
    return tree_map(_meta, tree)


def deep_copy(module: ModuleT, memo: dict[int, Any] | None = None) -> ModuleT:
    """As copy.deepcopy, also of modules that hold tensors with a history, which deepcopy refuses: torch.nn.utils.
    weight_norm keeps the product of its parameters, and computes it again before it is used."""
    computed = {id(tensor): tensor.detach().clone() for _, tensor in tensors_in(module) if tensor.grad_fn is not None}
    return copy.deepcopy(module, computed | (memo or {}))


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy, so that what a model keeps of a run (tables, masks) is kept elsewhere."""
    full = (tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
    computed = (tensor for _, tensor in tensors_in(model) if tensor.grad_fn is not None)
    memo = {id(tensor): _meta(tensor.detach()) for tensor in computed}
    return deep_copy(model, memo | {id(tensor): _meta(tensor) for tensor in full})


def realised_copy(module: nn.Module) -> nn.Module | None:
    """A copy with the values that a meta module of a deferred-init model would have; None where nobody knows them."""
    values: dict[int, torch.Tensor] = {}
    for _, tensor in tensors_in(module):
        if tensor.is_meta and tensor.grad_fn is None and id(tensor) not in values:
            source = source_of(tensor)
            if source is None:
                return None
            deferred, name = source
            value = deferred.value(name)
            is_parameter = isinstance(tensor, nn.Parameter)
            values[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return deep_copy(module, values)


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, nn.Parameter):
        return nn.Parameter(leaf.detach().to("meta"), requires_grad=leaf.requires_grad)
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf
