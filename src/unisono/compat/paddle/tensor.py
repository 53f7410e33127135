"""Tensor: a torch tensor that also answers to Paddle's names; and Paddle's functions of tensors.

What a program holds (batches, outputs, losses) are Tensors; within a layer's forward they are torch's own, of which
unisono makes traces and pipelines. Functions take both, and the variables of a static program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from unisono.compat.language import say
from unisono.errors import UsageError

_DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}

no_grad = torch.no_grad


def dtype_of(given: Any) -> torch.dtype:
    """A dtype as Paddle's programs write it: "float32", a NumPy dtype, or torch's."""
    if isinstance(given, torch.dtype):
        return given
    name = given if isinstance(given, str) else np.dtype(given).name
    if name not in _DTYPES:
        listed = ", ".join(_DTYPES)
        raise UsageError(
            say(
                f"dtype {given!r} is none of {listed}; Paddle would refuse it too",
                f"dtype {given!r} 不在 {listed} 之中；飞桨同样会拒绝",
            )
        )
    return _DTYPES[name]


class Tensor(torch.Tensor):
    """What is computed from one is one. NumPy reads it whether or not it has a gradient."""

    @property
    def stop_gradient(self) -> bool:
        return not self.requires_grad

    @stop_gradient.setter
    def stop_gradient(self, wanted: bool) -> None:
        if wanted and not self.is_leaf:
            self.detach_()
        elif self.is_leaf and (self.is_floating_point() or self.is_complex()):
            self.requires_grad_(not wanted)

    def numpy(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return plain(self).detach().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def item(self) -> Any:
        return plain(self).detach().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, format_spec: str) -> str:
        return format(plain(self).detach(), format_spec)

    def clear_gradient(self, set_to_zero: bool = True) -> None:
        self.grad = None

    clear_grad = clear_gradient

    def gradient(self) -> np.ndarray | None:
        """The gradient as an array; None where there is none yet."""
        return None if self.grad is None else plain(self.grad).detach().cpu().numpy()


def plain(value: Any) -> Any:
    """The same tensors, in any structure, as torch's own class: they share memory and history."""
    return tree_map(lambda leaf: leaf.as_subclass(torch.Tensor) if isinstance(leaf, Tensor) else leaf, value)


def wrapped(value: Any) -> Any:
    """The same tensors, in any structure, as Tensors; parameters stay what they are."""
    return tree_map(lambda leaf: leaf.as_subclass(Tensor) if type(leaf) is torch.Tensor else leaf, value)


def has_tensor(value: Any) -> bool:
    """Whether there is a Tensor in any structure: only programs hold them, and not what unisono runs."""
    found = False

    def look(leaf: Any) -> Any:
        nonlocal found
        found = found or isinstance(leaf, Tensor)
        return leaf

    tree_map(look, value)
    return found


def to_tensor(data: Any, dtype: Any = None, place: Any = None, stop_gradient: bool = True) -> Tensor:
    """A Tensor of numbers, an array or a tensor. place is taken and not needed: a rank has one device."""
    given = data if isinstance(data, torch.Tensor) else torch.as_tensor(np.asarray(data))
    if not isinstance(data, torch.Tensor | np.ndarray) and given.dtype == torch.float64:
        given = given.to(torch.get_default_dtype())  # Python's numbers; an array keeps its dtype
    made = plain(given).detach().to(None if dtype is None else dtype_of(dtype), copy=True)
    result: Tensor = made.as_subclass(Tensor)
    result.stop_gradient = stop_gradient
    return result


_agreed: list[int] = []  # the seed of rank 0, for programs that have seeded nothing


def seed(value: int) -> torch.Generator:
    """Seed what layers draw. NumPy's generator is not Paddle's, and is left alone."""
    _agreed[:] = [value]
    return torch.manual_seed(value)


def agree_on_seed(value: int) -> None:
    """The seed of all ranks, unless the program has given one."""
    _agreed[:] = _agreed or [value]


def common_seed() -> int:
    """What ranks seed with that are to draw the same."""
    return _agreed[0] if _agreed else torch.initial_seed()


def set_default_dtype(dtype: Any) -> None:
    torch.set_default_dtype(dtype_of(dtype))


def get_default_dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


# ---- functions, with Paddle's names of arguments -------------------------------------------------------------------


def matmul(x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False, name: str | None = None) -> Any:
    return torch.matmul(x.transpose(-1, -2) if transpose_x else x, y.transpose(-1, -2) if transpose_y else y)


def mean(x: Any, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    return torch.mean(x) if axis is None and not keepdim else torch.mean(x, _axes(axis, x), keepdim)


def sum(x: Any, axis: Any = None, dtype: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    wanted = None if dtype is None else dtype_of(dtype)
    return torch.sum(x, dtype=wanted) if axis is None else torch.sum(x, _axes(axis, x), keepdim, dtype=wanted)


def _axes(axis: Any, x: Any) -> Any:
    return tuple(range(x.dim())) if axis is None else tuple(axis) if isinstance(axis, list) else axis


def add(x: Any, y: Any, name: str | None = None) -> Any:
    return torch.add(x, y)


def reshape(x: Any, shape: Sequence[int], name: str | None = None) -> Any:
    """As Paddle's: 0 keeps a dim."""
    return torch.reshape(x, tuple(x.shape[dim] if size == 0 else size for dim, size in enumerate(shape)))


def transpose(x: Any, perm: Sequence[int], name: str | None = None) -> Any:
    return torch.permute(x, tuple(perm))


def concat(x: Sequence[Any], axis: int = 0, name: str | None = None) -> Any:
    return torch.cat(list(x), axis)


def stack(x: Sequence[Any], axis: int = 0, name: str | None = None) -> Any:
    return torch.stack(list(x), axis)


def squeeze(x: Any, axis: Any = None, name: str | None = None) -> Any:
    return torch.squeeze(x) if axis is None else torch.squeeze(x, _axes(axis, x))


def unsqueeze(x: Any, axis: int, name: str | None = None) -> Any:
    return torch.unsqueeze(x, axis)


def flatten(x: Any, start_axis: int = 0, stop_axis: int = -1, name: str | None = None) -> Any:
    return torch.flatten(x, start_axis, stop_axis)


def argmax(x: Any, axis: int | None = None, keepdim: bool = False, dtype: Any = "int64", name: Any = None) -> Any:
    return torch.argmax(x, axis, keepdim).to(dtype_of(dtype))


def cast(x: Any, dtype: Any) -> Any:
    return x.to(dtype_of(dtype))


def _new(made: torch.Tensor) -> Tensor:
    return made.as_subclass(Tensor)


def zeros(shape: Sequence[int], dtype: Any = None, name: str | None = None) -> Tensor:
    return _new(torch.zeros(tuple(shape), dtype=None if dtype is None else dtype_of(dtype)))


def ones(shape: Sequence[int], dtype: Any = None, name: str | None = None) -> Tensor:
    return _new(torch.ones(tuple(shape), dtype=None if dtype is None else dtype_of(dtype)))


def full(shape: Sequence[int], fill_value: Any, dtype: Any = None, name: str | None = None) -> Tensor:
    wanted = torch.get_default_dtype() if dtype is None else dtype_of(dtype)
    return _new(torch.full(tuple(shape), fill_value, dtype=wanted))


def randn(shape: Sequence[int], dtype: Any = None, name: str | None = None) -> Tensor:
    return _new(torch.randn(tuple(shape), dtype=None if dtype is None else dtype_of(dtype)))


def rand(shape: Sequence[int], dtype: Any = None, name: str | None = None) -> Tensor:
    return _new(torch.rand(tuple(shape), dtype=None if dtype is None else dtype_of(dtype)))


def randint(low: int = 0, high: int | None = None, shape: Sequence[int] = (1,), dtype: Any = "int64") -> Tensor:
    low, high = (0, low) if high is None else (low, high)
    return _new(torch.randint(low, high, tuple(shape), dtype=dtype_of(dtype)))


def arange(start: Any = 0, end: Any = None, step: Any = 1, dtype: Any = None, name: str | None = None) -> Tensor:
    start, end = (0, start) if end is None else (start, end)
    return _new(torch.arange(start, end, step, dtype=None if dtype is None else dtype_of(dtype)))
