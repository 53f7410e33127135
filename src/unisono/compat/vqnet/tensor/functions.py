"""VQNet's functions of tensors that are torch's, under VQNet's names and arguments: `axis`, `keepdims`, t1 and t2.

A QTensor gives QTensors; numbers, lists and arrays are made QTensors first. Random numbers are torch's, so
`utils.set_random_seed` decides on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.compat.language import say
from unisono.compat.vqnet.device import DEV_CPU, Device, device_of
from unisono.compat.vqnet.dtype import Dtype, dtype_of
from unisono.compat.vqnet.tensor.qtensor import QTensor, wrapped
from unisono.errors import UsageError

Axes = int | list[int] | tuple[int, ...] | None
Unary = Callable[[Any], torch.Tensor]
Binary = Callable[[Any, Any], torch.Tensor]


def _tensor(given: Any) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else QTensor(given)


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Unary:
    def of_one(t: Any) -> torch.Tensor:
        return function(_tensor(t))

    of_one.__name__ = of_one.__qualname__ = getattr(function, "__name__", "of_one")
    return of_one


def _binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Binary:
    def of_two(t1: Any, t2: Any) -> torch.Tensor:
        first = t1 if isinstance(t1, torch.Tensor) else None
        second = t2 if isinstance(t2, torch.Tensor) else None
        like = first if first is not None else second
        if like is None:
            return function(QTensor(t1), QTensor(t2))
        # a number or list takes the tensor's device, and its dtype by torch's rules
        made = [each if isinstance(each, torch.Tensor) else torch.as_tensor(each).to(like.device) for each in (t1, t2)]
        return function(made[0], made[1])

    of_two.__name__ = of_two.__qualname__ = getattr(function, "__name__", "of_two")
    return of_two


# ---- of each element ---------------------------------------------------------------------------------------------

abs = _unary(torch.abs)
acos = _unary(torch.acos)
asin = _unary(torch.asin)
atan = _unary(torch.atan)
ceil = _unary(torch.ceil)
cos = _unary(torch.cos)
cosh = _unary(torch.cosh)
exp = _unary(torch.exp)
floor = _unary(torch.floor)
isfinite = _unary(torch.isfinite)
isinf = _unary(torch.isinf)
isnan = _unary(torch.isnan)
log = _unary(torch.log)
logical_not = _unary(torch.logical_not)
neg = _unary(torch.neg)
reciprocal = _unary(torch.reciprocal)
round = _unary(torch.round)
sigmoid = _unary(torch.sigmoid)
sign = _unary(torch.sign)
sin = _unary(torch.sin)
sinh = _unary(torch.sinh)
sqrt = _unary(torch.sqrt)
square = _unary(torch.square)
tan = _unary(torch.tan)
tanh = _unary(torch.tanh)

add = _binary(torch.add)
sub = _binary(torch.sub)
mul = _binary(torch.mul)
divide = _binary(torch.div)
power = _binary(torch.pow)
matmul = _binary(torch.matmul)
maximum = _binary(torch.maximum)
minimum = _binary(torch.minimum)
equal = _binary(torch.eq)
not_equal = _binary(torch.ne)
greater = _binary(torch.gt)
greater_equal = _binary(torch.ge)
less = _binary(torch.lt)
less_equal = _binary(torch.le)
logical_and = _binary(torch.logical_and)
logical_or = _binary(torch.logical_or)
logical_xor = _binary(torch.logical_xor)


def clip(t: Any, min_val: float | None = None, max_val: float | None = None) -> torch.Tensor:
    return torch.clamp(_tensor(t), min_val, max_val)


def where(condition: Any, t1: Any, t2: Any) -> torch.Tensor:
    return torch.where(_tensor(condition).bool(), t1, t2)


def masked_fill(t: Any, mask: Any, value: float) -> torch.Tensor:
    return torch.masked_fill(_tensor(t), _tensor(mask).bool(), value)


# ---- over axes ---------------------------------------------------------------------------------------------------


def _over(function: Any, t: Any, axis: Axes, keepdims: bool) -> torch.Tensor:
    given = _tensor(t)
    dims = tuple(range(given.dim())) if axis is None else axis
    made: torch.Tensor = function(given, dims, keepdims)
    return made


def max(t: Any, axis: Axes = None, keepdims: bool = False) -> torch.Tensor:
    return _over(torch.amax, t, axis, keepdims)


def min(t: Any, axis: Axes = None, keepdims: bool = False) -> torch.Tensor:
    return _over(torch.amin, t, axis, keepdims)


def argmin(t: Any, dim: int | None = None, keepdims: bool = False) -> torch.Tensor:
    return torch.argmin(_tensor(t), dim, keepdims)


def var(t: Any, axis: Axes = None, keepdims: bool = False, unbiased: bool = True) -> torch.Tensor:
    return torch.var(_tensor(t), axis, correction=int(unbiased), keepdim=keepdims)


def std(t: Any, axis: Axes = None, keepdims: bool = False, unbiased: bool = True) -> torch.Tensor:
    return torch.std(_tensor(t), axis, correction=int(unbiased), keepdim=keepdims)


def cumsum(t: Any, axis: int = -1) -> torch.Tensor:
    return torch.cumsum(_tensor(t), axis)


def softmax(t: Any, axis: int = -1) -> torch.Tensor:
    return torch.softmax(_tensor(t), axis)


def log_softmax(t: Any, axis: int = -1) -> torch.Tensor:
    return torch.log_softmax(_tensor(t), axis)


def sort(t: Any, axis: int, descending: bool = False, stable: bool = True) -> torch.Tensor:
    return torch.sort(_tensor(t), dim=axis, descending=descending, stable=stable).values


def argsort(t: Any, axis: int, descending: bool = False, stable: bool = True) -> torch.Tensor:
    return torch.sort(_tensor(t), dim=axis, descending=descending, stable=stable).indices


def all(t: Any) -> torch.Tensor:
    return torch.all(_tensor(t))


def any(t: Any) -> torch.Tensor:
    return torch.any(_tensor(t))


def trace(t: Any, k: int = 0) -> torch.Tensor:
    return torch.diagonal(_tensor(t), k).sum()


# ---- of the shape ------------------------------------------------------------------------------------------------


def transpose(t: Any, dim: Sequence[int] | None = None) -> torch.Tensor:
    """The axes in the order `dim`; without it, reversed."""
    given = _tensor(t)
    return given.permute(tuple(reversed(range(given.dim()))) if dim is None else tuple(dim))


permute = transpose


def swapaxis(t: Any, axis1: int, axis2: int) -> torch.Tensor:
    return torch.swapaxes(_tensor(t), axis1, axis2)


def moveaxis(t: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> torch.Tensor:
    moved: torch.Tensor = torch.movedim(_tensor(t), source, destination)  # type: ignore[arg-type]
    return moved


def squeeze(t: Any, axis: int) -> torch.Tensor:
    """Without an axis of length one. VQNet has read axis=-1 as the last axis and as all: refused where these differ."""
    given = _tensor(t)
    if axis == -1 and given.squeeze(-1).shape != given.squeeze().shape:
        raise UsageError(
            say(
                f"squeeze(axis=-1) of shape {list(given.shape)}: the last axis, or all of length one? Give the axis "
                f"from the front, {given.dim() - 1}, or use torch.squeeze(t) for all",
                f"squeeze(axis=-1)，形状 {list(given.shape)}：是最后一维还是所有长度为一的维？请给出从前数的维 "
                f"{given.dim() - 1}，或用 torch.squeeze(t) 去掉所有",
            )
        )
    return given.squeeze(axis)


def unsqueeze(t: Any, axis: int = 0) -> torch.Tensor:
    return torch.unsqueeze(_tensor(t), axis)


def tile(t: Any, reps: Sequence[int]) -> torch.Tensor:
    return torch.tile(_tensor(t), tuple(reps))


def flip(t: Any, flip_dims: int | Sequence[int]) -> torch.Tensor:
    return torch.flip(_tensor(t), (flip_dims,) if isinstance(flip_dims, int) else tuple(flip_dims))


def diag(t: Any, k: int = 0) -> torch.Tensor:
    return torch.diag(_tensor(t), k)


def tril(t: Any, diagonal: int = 0) -> torch.Tensor:
    return torch.tril(_tensor(t), diagonal)


def triu(t: Any, diagonal: int = 0) -> torch.Tensor:
    return torch.triu(_tensor(t), diagonal)


def gather(t: Any, dim: int, index: Any) -> torch.Tensor:
    return torch.gather(_tensor(t), dim, _tensor(index).long())


def scatter(input: Any, dim: int, index: Any, src: Any) -> torch.Tensor:
    return torch.scatter(_tensor(input), dim, _tensor(index).long(), _tensor(src))


def nonzero(t: Any) -> torch.Tensor:
    return torch.nonzero(_tensor(t))


# ---- new ones ----------------------------------------------------------------------------------------------------


def _new(made: torch.Tensor, device: Device, dtype: Dtype | None) -> QTensor:
    new: QTensor = wrapped(made.to(device_of(device), None if dtype is None else dtype_of(dtype)))
    return new


def full_like(t: Any, value: Any) -> torch.Tensor:
    return torch.full_like(_tensor(t), value)


def eye(size: int, offset: int = 0, device: Device = DEV_CPU, dtype: Dtype | None = None) -> QTensor:
    """Ones on the diagonal, or so many columns right of it."""
    rows = torch.arange(size)
    return _new((rows.unsqueeze(0) - rows.unsqueeze(1) == offset).float(), device, dtype)


def linspace(start: float, end: float, num: int, device: Device = DEV_CPU, dtype: Dtype | None = None) -> QTensor:
    return _new(torch.linspace(start, end, num), device, dtype)


def randn(
    shape: Sequence[int], mean: float = 0.0, std: float = 1.0, device: Device = DEV_CPU, dtype: Dtype | None = None
) -> QTensor:
    return _new(torch.randn(tuple(shape)) * std + mean, device, dtype)


def randu(
    shape: Sequence[int], min: float = 0.0, max: float = 1.0, device: Device = DEV_CPU, dtype: Dtype | None = None
) -> QTensor:
    return _new(torch.rand(tuple(shape)) * (max - min) + min, device, dtype)
