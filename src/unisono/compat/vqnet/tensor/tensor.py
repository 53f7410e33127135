"""VQNet's functions of tensors, as far as its distributed programs use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.compat.vqnet.device import DEV_CPU, Device, device_of
from unisono.compat.vqnet.dtype import Dtype, dtype_of
from unisono.compat.vqnet.tensor.functions import abs as abs
from unisono.compat.vqnet.tensor.functions import acos as acos
from unisono.compat.vqnet.tensor.functions import add as add
from unisono.compat.vqnet.tensor.functions import all as all
from unisono.compat.vqnet.tensor.functions import any as any
from unisono.compat.vqnet.tensor.functions import argmin as argmin
from unisono.compat.vqnet.tensor.functions import argsort as argsort
from unisono.compat.vqnet.tensor.functions import asin as asin
from unisono.compat.vqnet.tensor.functions import atan as atan
from unisono.compat.vqnet.tensor.functions import ceil as ceil
from unisono.compat.vqnet.tensor.functions import clip as clip
from unisono.compat.vqnet.tensor.functions import cos as cos
from unisono.compat.vqnet.tensor.functions import cosh as cosh
from unisono.compat.vqnet.tensor.functions import cumsum as cumsum
from unisono.compat.vqnet.tensor.functions import diag as diag
from unisono.compat.vqnet.tensor.functions import divide as divide
from unisono.compat.vqnet.tensor.functions import equal as equal
from unisono.compat.vqnet.tensor.functions import exp as exp
from unisono.compat.vqnet.tensor.functions import eye as eye
from unisono.compat.vqnet.tensor.functions import flip as flip
from unisono.compat.vqnet.tensor.functions import floor as floor
from unisono.compat.vqnet.tensor.functions import full_like as full_like
from unisono.compat.vqnet.tensor.functions import gather as gather
from unisono.compat.vqnet.tensor.functions import greater as greater
from unisono.compat.vqnet.tensor.functions import greater_equal as greater_equal
from unisono.compat.vqnet.tensor.functions import isfinite as isfinite
from unisono.compat.vqnet.tensor.functions import isinf as isinf
from unisono.compat.vqnet.tensor.functions import isnan as isnan
from unisono.compat.vqnet.tensor.functions import less as less
from unisono.compat.vqnet.tensor.functions import less_equal as less_equal
from unisono.compat.vqnet.tensor.functions import linspace as linspace
from unisono.compat.vqnet.tensor.functions import log as log
from unisono.compat.vqnet.tensor.functions import log_softmax as log_softmax
from unisono.compat.vqnet.tensor.functions import logical_and as logical_and
from unisono.compat.vqnet.tensor.functions import logical_not as logical_not
from unisono.compat.vqnet.tensor.functions import logical_or as logical_or
from unisono.compat.vqnet.tensor.functions import logical_xor as logical_xor
from unisono.compat.vqnet.tensor.functions import masked_fill as masked_fill
from unisono.compat.vqnet.tensor.functions import matmul as matmul
from unisono.compat.vqnet.tensor.functions import max as max
from unisono.compat.vqnet.tensor.functions import maximum as maximum
from unisono.compat.vqnet.tensor.functions import min as min
from unisono.compat.vqnet.tensor.functions import minimum as minimum
from unisono.compat.vqnet.tensor.functions import moveaxis as moveaxis
from unisono.compat.vqnet.tensor.functions import mul as mul
from unisono.compat.vqnet.tensor.functions import neg as neg
from unisono.compat.vqnet.tensor.functions import nonzero as nonzero
from unisono.compat.vqnet.tensor.functions import not_equal as not_equal
from unisono.compat.vqnet.tensor.functions import permute as permute
from unisono.compat.vqnet.tensor.functions import power as power
from unisono.compat.vqnet.tensor.functions import randn as randn
from unisono.compat.vqnet.tensor.functions import randu as randu
from unisono.compat.vqnet.tensor.functions import reciprocal as reciprocal
from unisono.compat.vqnet.tensor.functions import round as round
from unisono.compat.vqnet.tensor.functions import scatter as scatter
from unisono.compat.vqnet.tensor.functions import sigmoid as sigmoid
from unisono.compat.vqnet.tensor.functions import sign as sign
from unisono.compat.vqnet.tensor.functions import sin as sin
from unisono.compat.vqnet.tensor.functions import sinh as sinh
from unisono.compat.vqnet.tensor.functions import softmax as softmax
from unisono.compat.vqnet.tensor.functions import sort as sort
from unisono.compat.vqnet.tensor.functions import sqrt as sqrt
from unisono.compat.vqnet.tensor.functions import square as square
from unisono.compat.vqnet.tensor.functions import squeeze as squeeze
from unisono.compat.vqnet.tensor.functions import std as std
from unisono.compat.vqnet.tensor.functions import sub as sub
from unisono.compat.vqnet.tensor.functions import swapaxis as swapaxis
from unisono.compat.vqnet.tensor.functions import tan as tan
from unisono.compat.vqnet.tensor.functions import tanh as tanh
from unisono.compat.vqnet.tensor.functions import tile as tile
from unisono.compat.vqnet.tensor.functions import trace as trace
from unisono.compat.vqnet.tensor.functions import transpose as transpose
from unisono.compat.vqnet.tensor.functions import tril as tril
from unisono.compat.vqnet.tensor.functions import triu as triu
from unisono.compat.vqnet.tensor.functions import unsqueeze as unsqueeze
from unisono.compat.vqnet.tensor.functions import var as var
from unisono.compat.vqnet.tensor.functions import where as where
from unisono.compat.vqnet.tensor.qtensor import QTensor, wrapped
from unisono.compat.vqnet.vqnet_names import missing_names

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


__getattr__ = missing_names(__name__)
