"""A reduced model: the same with fewer blocks, small enough for a step on one device.

What a plan can get wrong in a block, it gets wrong in each block of its kind; so the first blocks that show every kind
(and one for each stage of a pipeline) stand for all. Blocks are of one kind if they are of one class and print alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.mesh.draft import Draft, tensors_in
from unisono.parallel.apply import order_of
from unisono.parallel.blocks import find_blocks
from unisono.parallel.meta.meta_tensors import deep_copy
from unisono.plan.plan import Plan

_LEAST = 2  # blocks: one that follows another of its kind


def reduced_model(draft: Draft, plan: Plan) -> tuple[nn.Module | None, str]:
    """A copy with fewer blocks, in memory of its own, and how many they are; None where none can be left out.

    Parameters of a model that has no values yet are drawn at random, the same on every rank.
    """
    model = draft.model
    try:
        blocks = find_blocks(model)
    except UsageError:
        return None, ""
    count = _kept([_kind(block) for block in blocks.modules], order_of(plan).stages if plan.pp > 1 else 1)
    if blocks.names or count >= len(blocks.modules):
        return None, ""
    holder = model.get_submodule(blocks.path)._modules
    removed = {key: holder.pop(key) for key in list(holder)[count:]}
    try:
        short = deep_copy(model, _values(model, draft) if draft.is_hollow else None)
    finally:
        holder.update(removed)
    _count_blocks_anew(short, len(blocks.modules), count)
    return short, f"{count} of its {len(blocks.modules)} blocks"


def _kept(kinds: list[Any], stages: int) -> int:
    """The length of the shortest prefix with all kinds of blocks, and one for each stage."""
    first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    return max(*first.values(), _LEAST - 1, stages - 1) + 1


def _kind(block: nn.Module) -> tuple[Any, ...]:
    return type(block), str(block), tuple(tuple(parameter.shape) for parameter in block.parameters())


def _values(model: nn.Module, draft: Draft) -> dict[int, torch.Tensor]:
    """For a copy, by the ids of what they take the place of: buffers as they would be, parameters at random."""
    generator = torch.Generator().manual_seed(0)
    values: dict[int, torch.Tensor] = {}
    for name, tensor in tensors_in(model):
        if not tensor.is_meta or id(tensor) in values:
            continue
        if isinstance(tensor, nn.Parameter):
            device = draft.device(name)
            drawn = torch.randn(tensor.shape, generator=generator) * (0.02 if tensor.dim() > 1 else 0.1)
            drawn = drawn + 1 if tensor.dim() == 1 and name.endswith("weight") else drawn
            values[id(tensor)] = nn.Parameter(drawn.to(device, tensor.dtype), tensor.requires_grad)
        else:
            values[id(tensor)] = draft.value(name)
    return values


def _count_blocks_anew(model: nn.Module, before: int, count: int) -> None:
    """Models that count their blocks keep the number in a configuration, which the copy has for itself."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if not isinstance(config, dict) and getattr(config, name, None) == before:
                setattr(config, name, count)
