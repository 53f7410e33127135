"""VQNet's functions of tensors, as far as its distributed programs use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.compat.vqnet.device import DEV_CPU, Device, device_of
from unisono.compat.vqnet.dtype import Dtype, dtype_of
from unisono.compat.vqnet.tensor.qtensor import QTensor, wrapped

no_grad = torch.no_grad


def to_tensor(data: Any) -> QTensor:
    """A QTensor of numbers or an array; one that is there already as it is."""
    return data if isinstance(data, QTensor) else QTensor(data)


def _new(made: torch.Tensor, device: Device, dtype: Dtype | None) -> QTensor:
    return wrapped(made.to(device_of(device), None if dtype is None else dtype_of(dtype)))


def zeros(shape: Sequence[int], device: Device = DEV_CPU, dtype: Dtype | None = None) -> QTensor:
    return _new(torch.zeros(tuple(shape)), device, dtype)


def ones(shape: Sequence[int], device: Device = DEV_CPU, dtype: Dtype | None = None) -> QTensor:
    return _new(torch.ones(tuple(shape)), device, dtype)


def full(shape: Sequence[int], value: Any, device: Device = DEV_CPU, dtype: Dtype | None = None) -> QTensor:
    return _new(torch.full(tuple(shape), value), device, dtype)


def arange(start: Any, end: Any, step: Any = 1, device: Device = DEV_CPU, dtype: Dtype | None = None) -> QTensor:
    return _new(torch.arange(start, end, step), device, dtype)


def zeros_like(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(t)


def ones_like(t: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(t)


def reshape(t: torch.Tensor, new_shape: Sequence[int]) -> torch.Tensor:
    return t.reshape(tuple(new_shape))


def flatten(t: torch.Tensor, start: int = 0, end: int = -1) -> torch.Tensor:
    return torch.flatten(t, start, end)


def broadcast_to(t: torch.Tensor, ref: Sequence[int]) -> torch.Tensor:
    return torch.broadcast_to(t, tuple(ref))


def concatenate(args: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    return torch.cat(list(args), axis)


def stack(QTensors: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    return torch.stack(list(QTensors), axis)


def argmax(t: torch.Tensor, dim: int | None = None, keepdims: bool = False) -> torch.Tensor:
    return torch.argmax(t, dim, keepdims)


def sums(t: torch.Tensor, axis: int | None = None, keepdims: bool = False) -> torch.Tensor:
    return torch.sum(t, axis, keepdims)


def mean(t: torch.Tensor, axis: int | None = None, keepdims: bool = False) -> torch.Tensor:
    return torch.mean(t, axis, keepdims)
