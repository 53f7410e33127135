"""Calls of torch that are watched: those by which Python sees values of a tensor, or a shape that depends on them, and
may branch on them; and whether a call is the user's or unisono's own."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unisono.mesh.interception import function_arguments

_VALUES = frozenset(
    ("__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "__format__", "__repr__",
     "__array__", "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select",
     "unique", "unique_consecutive", "bincount", "repeat_interleave")
)  # fmt: skip
# Modules whose modes pass calls of the user's on.
_WATCHING = (__name__, "unisono.parallel.checks.parameter_reads", function_arguments.__module__)


def reads_values(function: Any, args: Any, kwargs: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name == "__getitem__":
        return _has_mask(args[1])
    return name in _VALUES or (name == "where" and len(args) + len(kwargs or {}) == 1)


def _has_mask(index: Any) -> bool:
    leaves = tree_leaves(index)
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves)


def is_ours() -> bool:
    """Whether torch was called by unisono itself, other than from a mode that passes on a call of the user's."""
    frame: Any = sys._getframe(1)
    while frame is not None and (_package(frame) == "torch" or _passes_calls_on(frame)):
        frame = frame.f_back
    return frame is not None and _package(frame) == "unisono"


def _passes_calls_on(frame: Any) -> bool:
    return frame.f_globals.get("__name__") in _WATCHING or frame.f_code.co_name == "__torch_function__"


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
