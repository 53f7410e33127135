"""One op of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

Memory = tuple[int, int]  # the storage of a tensor: a number that is its own, and its bytes


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a full tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Op:
    """One op of the forward pass, with what it costs on one device."""

    name: str
    target: Any  # torch.ops.aten.linear.default, operator.getitem, ...
    node: fx.Node
    inputs: tuple[str, ...]  # the nodes that give its tensors, in the order of its flattened arguments
    outputs: tuple[TensorSpec, ...]
    flops: int  # multiplications and additions of products (matmuls, convolutions, attention)
    bytes_moved: int  # read and written; nothing where the result is a view
    saved: int  # bytes that autograd keeps from here to the backward, and that no earlier op keeps
    path: str  # of the module that it runs in: "model.layers.0.mlp"
    line: str  # "model.py:42"
    saves: tuple[Memory, ...] = ()  # what autograd keeps of it, new or not
