"""The inputs of a model as a user gives them: one tensor, a tuple of arguments, or a dict of named ones; and outputs in
dataclasses, which torch looks into once it knows them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        outputs = model(**inputs)
    else:
        outputs = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    register_dataclasses(outputs)
    return outputs


def register_dataclasses(outputs: Any) -> None:
    """Have torch.utils._pytree look into the dataclasses among a model's outputs, and into those within them."""
    kinds = {type(leaf) for leaf in tree_leaves(outputs) if not isinstance(leaf, torch.Tensor)}
    found = [kind for kind in kinds if dataclasses.is_dataclass(kind) and all(f.init for f in dataclasses.fields(kind))]
    for kind in found:
        register_dataclass(kind)
    if found:
        register_dataclasses(outputs)


def cloned(batch: Any) -> Any:
    """A batch for a trial run: what a model writes to its inputs does not reach the user's tensors."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
