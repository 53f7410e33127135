"""Which dim of each parameter tensor parallelism shards: what the planner counts with, and a program is marked by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.parallel.rules.rules import Style, Styles
from unisono.parallel.tensor import adapters
from unisono.parallel.tensor.linear import is_linear, is_transposed
from unisono.torch_compat import ConvNd

_COLUMN = ("column", "column_gather", "vocab_head", "logits", "column_inside")
_ROW = ("row", "row_split", "row_sum")


@dataclass(frozen=True)
class ShardedDim:
    """is_packed: the parameter is parts side by side, such as queries, keys and values; each of them is sharded."""

    dim: int
    is_packed: bool = False


def sharded_dims(model: nn.Module, styles: Styles) -> dict[str, ShardedDim]:
    """Of the parameters that are sharded, by name; one that has several has all of them here."""
    modules = dict(model.named_modules(remove_duplicate=False))
    dims: dict[int, ShardedDim] = {}
    for name, style in styles.items():
        module = modules.get(name)
        if module is not None:
            dims |= {id(parameter): dim for parameter, dim in _of_module(module, style)}
        elif style.kind == "channels":
            dims[id(model.get_parameter(name))] = ShardedDim(style.dim)
        elif style.kind in ("column", "row"):  # expert weights: (experts, outputs, inputs)
            is_packed = len(style.parts) > 1
            dims[id(model.get_parameter(name))] = ShardedDim(1 if style.kind == "column" else 2, is_packed)
    named = model.named_parameters(remove_duplicate=False)
    return {name: dims[id(parameter)] for name, parameter in named if id(parameter) in dims}


def _of_module(module: Any, style: Style) -> Iterator[tuple[torch.Tensor, ShardedDim]]:
    if is_linear(module):
        yield from _of_linear(module, style)
    elif style.kind == "vocab":
        yield module.weight, ShardedDim(0)
    elif isinstance(module, ConvNd) and style.kind in ("column", "row", "channels"):
        yield module.weight, ShardedDim(int(style.kind == "row"))
        if module.bias is not None and style.kind != "row":
            yield module.bias, ShardedDim(0)
    elif style.kind == "heads" and isinstance(module, nn.MultiheadAttention):
        for parameter in (module.in_proj_weight, module.in_proj_bias):
            if parameter is not None:
                yield parameter, ShardedDim(0, is_packed=True)
        for parameter in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
            if parameter is not None:
                yield parameter, ShardedDim(0)
        yield module.out_proj.weight, ShardedDim(1)


def _of_linear(module: Any, style: Style) -> Iterator[tuple[torch.Tensor, ShardedDim]]:
    is_packed = len(style.parts) > 1
    if adapters.is_adapted_linear(module) and style.kind in (*_COLUMN, *_ROW):
        for name, dim in adapters.dims(module, by_rows=style.kind in _ROW).items():
            if dim is not None:
                yield module.get_parameter(name), ShardedDim(dim, is_packed)
    elif style.kind in _COLUMN:
        yield module.weight, ShardedDim(1 if is_transposed(module) else 0, is_packed)
        if module.bias is not None:
            yield module.bias, ShardedDim(0, is_packed)
    elif style.kind in _ROW:
        yield module.weight, ShardedDim(0 if is_transposed(module) else 1)
