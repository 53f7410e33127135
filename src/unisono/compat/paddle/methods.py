"""Methods of tensors that Paddle and torch both have, with another meaning, or that only Paddle has.

    x.split(2, -1)      # in a program for Paddle: two parts; in torch: parts of two

A Tensor has them always. Within a layer's forward, and in a loss that unisono calls, tensors are torch's own, and
torch's class gets these methods while the block of `METHODS` lasts. Either way they are for the program's code alone:
torch, unisono and other installed packages, which call methods of these names all the time, find torch's.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from unisono.compat.language import say
from unisono.compat.paddle import tensor as functions
from unisono.compat.paddle.tensor import Tensor
from unisono.errors import UsageError
from unisono.torch_patches import PatchSet

_PACKAGES = tuple(
    os.path.dirname(os.path.abspath(sys.modules[name].__file__ or "")) + os.sep for name in ("torch", "unisono")
)
_INSTALLED = os.sep + "site-packages" + os.sep
_GENERATED = ("<eval_with_key>", "<unisono program")  # code of graphs


@functools.cache
def _is_of_the_program(file: str) -> bool:
    return not (file.startswith((*_PACKAGES, *_GENERATED)) or _INSTALLED in file)


class Method:
    """A method of tensors: the program's code finds `meaning`, all else what torch has under the name, if anything."""

    def __init__(self, name: str, meaning: Callable[..., Any]) -> None:
        self.name, self.meaning = name, meaning
        self.own = getattr(torch.Tensor, name, None)

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is not None and _is_of_the_program(sys._getframe(1).f_code.co_filename):
            return functools.partial(self.meaning, tensor)
        if self.own is None:
            raise AttributeError(f"'Tensor' object has no attribute {self.name!r}")
        return self.own if tensor is None else self.own.__get__(tensor, owner)


# ---- their meaning ---------------------------------------------------------------------------------------------------


def split(x: Any, num_or_sections: Any, axis: int = 0, name: str | None = None) -> Any:
    """num_or_sections: how many equal parts, or the size of each, of which one may be -1."""
    size = x.shape[axis]
    if isinstance(num_or_sections, int):
        if num_or_sections < 1 or size % num_or_sections:
            raise UsageError(
                say(
                    f"split({num_or_sections}, axis={axis}) of shape {list(x.shape)}: as in Paddle, that is how many "
                    f"equal parts, and they must divide {size}; give their sizes as a list",
                    f"split({num_or_sections}, axis={axis})，形状 {list(x.shape)}：与飞桨相同，它是等分的份数，须能"
                    f"整除 {size}；也可用列表给出各份的大小",
                )
            )
        return list(torch.tensor_split(x, num_or_sections, axis))
    sizes = [int(each) for each in num_or_sections]
    rest = size - sum(each for each in sizes if each != -1)
    return list(torch.split(x, [rest if each == -1 else each for each in sizes], axis))


def _extreme(of: Callable[..., Any], x: Any, axis: Any, keepdim: bool) -> Any:
    """The values. As in Paddle, every element that is equal to one has its full gradient."""
    dims = functions._axes(axis, x)
    found = of(x.detach(), dims, keepdim)
    if not x.is_floating_point():
        return found
    hit = (x == of(x.detach(), dims, True)) & torch.isfinite(x)
    return found + torch.sum(torch.where(hit, x - x.detach(), torch.zeros_like(x)), dims, keepdim)


def max(x: Any, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """The largest values, without their places."""
    return _extreme(torch.amax, x, axis, keepdim)


def min(x: Any, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    """The smallest values, without their places."""
    return _extreme(torch.amin, x, axis, keepdim)


def sort(x: Any, axis: int = -1, descending: bool = False, stable: bool = False, name: str | None = None) -> Any:
    """The values, without their places."""
    return torch.sort(x, stable=stable, dim=axis, descending=descending).values


def median(x: Any, axis: int | None = None, keepdim: bool = False, name: str | None = None) -> Any:
    """Of an even number of elements, the mean of the two in the middle."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    return torch.quantile(x, 0.5, dim=axis, keepdim=keepdim)


def round(x: Any, decimals: int = 0, name: str | None = None) -> Any:
    """Halves away from zero."""
    if not x.is_floating_point():
        return x
    scale = 10.0**decimals
    return torch.sign(x) * torch.floor(torch.abs(x) * scale + 0.5) / scale


def equal(x: Any, y: Any, name: str | None = None) -> Any:
    """Element by element."""
    return torch.eq(x, y)


def equal_all(x: Any, y: Any, name: str | None = None) -> Any:
    return torch.all(torch.eq(x, y)) if x.shape == y.shape else torch.zeros((), dtype=torch.bool)


def where(condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> Any:
    return torch.where(condition) if x is None and y is None else torch.where(condition, x, y)


def gather(x: Any, index: Any, axis: Any = 0, name: str | None = None) -> Any:
    """Slices along an axis."""
    if isinstance(index, int):  # torch's order of arguments
        return torch.gather(x, index, axis)
    return torch.index_select(x, int(axis), index.reshape(-1))


def index_select(x: Any, index: Any, axis: Any = 0, name: str | None = None) -> Any:
    return torch.index_select(x, index, axis) if isinstance(index, int) else torch.index_select(x, int(axis), index)


def transpose(x: Any, *perm: Any, **named: Any) -> Any:
    """By the order of all dims; two numbers are torch's two dims."""
    if len(perm) == 2:
        return torch.transpose(x, *perm)
    return functions.transpose(x, *perm, **named)


def reshape(x: Any, *shape: Any, **named: Any) -> Any:
    return functions.reshape(x, shape) if shape and isinstance(shape[0], int) else functions.reshape(x, *shape, **named)


def unsqueeze(x: Any, axis: Any, name: str | None = None) -> Any:
    for each in [axis] if isinstance(axis, int) else axis:
        x = torch.unsqueeze(x, each)
    return x


def uniform_(x: Any, min: float = -1.0, max: float = 1.0, seed: int = 0, name: str | None = None) -> Any:
    if seed:
        raise UsageError(
            say(
                f"uniform_(seed={seed}): Paddle would draw from a generator of its own; here give paddle.seed(...)",
                f"uniform_(seed={seed})：飞桨会使用单独的随机数生成器；这里请用 paddle.seed(...)",
            )
        )
    return torch.nn.init.uniform_(x, min, max)


MEANINGS: dict[str, Callable[..., Any]] = {
    "astype": functions.cast,
    "cast": functions.cast,
    "equal": equal,
    "equal_all": equal_all,
    "flatten": functions.flatten,
    "gather": gather,
    "greater_than": torch.gt,
    "index_select": index_select,
    "less_than": torch.lt,
    "matmul": functions.matmul,
    "max": max,
    "mean": functions.mean,
    "median": median,
    "min": min,
    "reshape": reshape,
    "round": round,
    "sort": sort,
    "split": split,
    "squeeze": functions.squeeze,
    "sum": functions.sum,
    "transpose": transpose,
    "uniform_": uniform_,
    "unsqueeze": unsqueeze,
    "where": where,
}

_METHODS = {name: Method(name, meaning) for name, meaning in MEANINGS.items()}
for _name, _method in _METHODS.items():
    setattr(Tensor, _name, _method)

METHODS = PatchSet(
    {(torch.Tensor, name): method for name, method in _METHODS.items()},
    why="tensors in a forward for Paddle have Paddle's methods (compat.paddle)",
    until="the forward's end",
)


def with_methods(loss: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A program's loss, as unisono calls it."""

    def called(outputs: Any, targets: Any) -> Any:
        with METHODS:
            return loss(outputs, targets)

    return called
