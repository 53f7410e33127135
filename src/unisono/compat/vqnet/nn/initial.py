"""Initial values: a VQNet initializer is given a shape and returns a tensor; torch's fill a tensor in target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.compat.language import say
from unisono.errors import UsageError

Initializer = Callable[..., Any]


@torch.no_grad()
def fill(tensor: torch.Tensor, initializer: Initializer | None, transposed: bool = False) -> None:
    """Give the tensor the initializer's values; None leaves it as it is.

    transposed: a VQNet initializer is asked for the transpose, as VQNet writes Y = X A and torch keeps A's transpose.
    """
    if initializer is None:
        return
    if getattr(initializer, "__module__", "") == "torch.nn.init":
        initializer(tensor)
        return
    target = tensor.t() if transposed else tensor
    shape = tuple(target.shape)
    made, name = initializer(list(shape)), getattr(initializer, "__name__", type(initializer).__name__)
    try:
        values = torch.as_tensor(made)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            say(
                f"initializer {name} gave {made!r}; expected a tensor of shape {shape}",
                f"初始化函数 {name} 给出 {made!r}；应为形状为 {shape} 的张量",
            )
        ) from None
    if tuple(values.shape) != shape:
        raise UsageError(
            say(
                f"initializer {name} gave a tensor of shape {tuple(values.shape)}; expected {shape}",
                f"初始化函数 {name} 给出形状为 {tuple(values.shape)} 的张量；应为 {shape}",
            )
        )
    target.copy_(values)
