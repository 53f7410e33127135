"""The inputs of a model as a user gives them: one tensor, a tuple of arguments, or a dict of named ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def cloned(batch: Any) -> Any:
    """A batch for a trial run: what a model writes to its inputs does not reach the user's tensors."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
