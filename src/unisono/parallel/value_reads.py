"""Calls of torch by which Python sees the value of a tensor, or a shape that depends on values: it may branch on it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_VALUES = frozenset(
    ("__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "__format__", "__repr__",
     "__array__", "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select",
     "unique", "unique_consecutive", "bincount", "repeat_interleave")
)  # fmt: skip


def reads_values(function: Any, args: Any, kwargs: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name == "__getitem__":
        return _has_mask(args[1])
    return name in _VALUES or (name == "where" and len(args) + len(kwargs or {}) == 1)


def _has_mask(index: Any) -> bool:
    leaves = tree_leaves(index)
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves)
