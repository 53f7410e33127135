"""Initial values by name, with MindSpore's numbers: initializer("normal", [32, 16]) has a deviation of 0.01.

Each call draws from a generator of its own (seed.py), so that every rank, and one device alone, has the same values.
"""

from __future__ import annotations

import abc
import difflib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import init

from unisono.compat.language import say
from unisono.compat.mindspore.common.seed import next_generator
from unisono.compat.mindspore.common.tensor import Tensor, plain
from unisono.compat.mindspore.mindspore_names import missing_names
from unisono.errors import UsageError

__getattr__ = missing_names(__name__)


class Initializer(abc.ABC):
    """Fills a tensor."""

    @abc.abstractmethod
    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None: ...


class Normal(Initializer):
    def __init__(self, sigma: float = 0.01, mean: float = 0.0) -> None:
        self.sigma, self.mean = sigma, mean

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        init.normal_(tensor, self.mean, self.sigma, generator=generator)


class TruncatedNormal(Initializer):
    """Within two deviations."""

    def __init__(self, sigma: float = 0.01, mean: float = 0.0) -> None:
        self.sigma, self.mean = sigma, mean

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        low, high = self.mean - 2 * self.sigma, self.mean + 2 * self.sigma
        init.trunc_normal_(tensor, self.mean, self.sigma, low, high, generator=generator)


class Uniform(Initializer):
    def __init__(self, scale: float = 0.07) -> None:
        self.scale = scale

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        init.uniform_(tensor, -self.scale, self.scale, generator=generator)


class XavierUniform(Initializer):
    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        init.xavier_uniform_(tensor, self.gain, generator=generator)


class HeUniform(Initializer):
    def __init__(self, negative_slope: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu") -> None:
        self.negative_slope, self.mode, self.nonlinearity = negative_slope, mode, nonlinearity

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        init.kaiming_uniform_(tensor, self.negative_slope, self.mode, self.nonlinearity, generator=generator)


class HeNormal(HeUniform):
    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        init.kaiming_normal_(tensor, self.negative_slope, self.mode, self.nonlinearity, generator=generator)


class Constant(Initializer):
    def __init__(self, value: float) -> None:
        self.value = value

    def fill(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        init.constant_(tensor, self.value)


class Zero(Constant):
    def __init__(self) -> None:
        super().__init__(0.0)


class One(Constant):
    def __init__(self) -> None:
        super().__init__(1.0)


_BY_NAME: dict[str, type[Initializer]] = {
    "normal": Normal,
    "truncatednormal": TruncatedNormal,
    "uniform": Uniform,
    "xavier_uniform": XavierUniform,
    "he_uniform": HeUniform,
    "he_normal": HeNormal,
    "zeros": Zero,
    "zero": Zero,
    "ones": One,
    "one": One,
}


def initializer(init: Any, shape: Sequence[int] | int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of initial values: by a name, an Initializer, a number, or a tensor that has them already."""
    if isinstance(init, torch.Tensor):
        if shape is not None and tuple(init.shape) != _sizes(shape):
            raise UsageError(
                say(
                    f"initializer: a tensor of shape {tuple(init.shape)} for shape {_sizes(shape)}",
                    f"initializer：张量形状为 {tuple(init.shape)}，而要求的形状为 {_sizes(shape)}",
                )
            )
        return Tensor(init, dtype)
    if shape is None:
        raise UsageError(
            say(
                f"initializer({init!r}) has no shape; expected one, such as [32, 16]",
                f"initializer({init!r}) 没有形状；请给出，如 [32, 16]",
            )
        )
    made = torch.empty(_sizes(shape), dtype=dtype)
    with torch.no_grad():
        _initializer(init).fill(made, next_generator())
    return plain(made).as_subclass(Tensor)


def _initializer(given: Any) -> Initializer:
    if isinstance(given, Initializer):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return Constant(float(given))
    if isinstance(given, str) and given.lower() in _BY_NAME:
        return _BY_NAME[given.lower()]()
    close = difflib.get_close_matches(str(given).lower(), _BY_NAME, 1)
    hint = say(f"did you mean {close[0]!r}? ", f"是否想写 {close[0]!r}？") if close else ""
    raise UsageError(
        say(
            f"initializer({given!r}): {hint}expected a number, an Initializer or one of {', '.join(_BY_NAME)}",
            f"initializer({given!r})：{hint}应为数、Initializer 或 {', '.join(_BY_NAME)} 之一",
        )
    )


def _sizes(shape: Sequence[int] | int) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def bound_of(fan_in: int) -> Uniform:
    """The bias of a layer: uniform within one over the root of the number of its inputs."""
    return Uniform(1 / math.sqrt(fan_in))
