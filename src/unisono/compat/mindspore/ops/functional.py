"""MindSpore's functions of tensors: torch's, with MindSpore's names and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

__all__ = [
    "abs",
    "add",
    "cat",
    "concat",
    "cross_entropy",
    "div",
    "exp",
    "expand_dims",
    "gelu",
    "log",
    "log_softmax",
    "matmul",
    "mul",
    "ones_like",
    "relu",
    "reshape",
    "sigmoid",
    "softmax",
    "sqrt",
    "square",
    "stack",
    "sub",
    "tanh",
    "transpose",
    "zeros_like",
]

abs = torch.abs
add = torch.add
div = torch.div
exp = torch.exp
log = torch.log
matmul = torch.matmul
mul = torch.mul
ones_like = torch.ones_like
relu = torch.relu
sigmoid = torch.sigmoid
sqrt = torch.sqrt
square = torch.square
sub = torch.sub
tanh = torch.tanh
zeros_like = torch.zeros_like


def reshape(input: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return input.reshape(tuple(shape))


def transpose(input: torch.Tensor, input_perm: Sequence[int]) -> torch.Tensor:
    return input.permute(tuple(input_perm))


def expand_dims(input_x: torch.Tensor, axis: int) -> torch.Tensor:
    return input_x.unsqueeze(axis)


def softmax(input: torch.Tensor, axis: int = -1) -> torch.Tensor:
    return torch.softmax(input, axis)


def log_softmax(logits: torch.Tensor, axis: int = -1) -> torch.Tensor:
    return torch.log_softmax(logits, axis)


def gelu(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return F.gelu(input, approximate=approximate)


def cat(tensors: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    return torch.cat(tuple(tensors), axis)


concat = cat


def stack(tensors: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    return torch.stack(tuple(tensors), axis)


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    return F.cross_entropy(
        input, target.long() if not target.is_floating_point() else target, weight,
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip
