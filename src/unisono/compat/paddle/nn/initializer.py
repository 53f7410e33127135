"""Paddle's initializers: what layers draw their parameters with. The default is XavierUniform, and zeros for biases."""

from __future__ import annotations

import abc
import math
from typing import Any

import torch

from unisono.compat.paddle.paddle_names import missing_names


class Initializer(abc.ABC):
    def __call__(self, param: torch.Tensor, block: Any = None) -> None:
        with torch.no_grad():
            self.fill(param)

    @abc.abstractmethod
    def fill(self, param: torch.Tensor) -> None: ...


class Constant(Initializer):
    def __init__(self, value: float = 0.0) -> None:
        self._value = value

    def fill(self, param: torch.Tensor) -> None:
        param.fill_(self._value)


class Normal(Initializer):
    def __init__(self, mean: float = 0.0, std: float = 1.0, name: str | None = None) -> None:
        self._mean, self._std = mean, std

    def fill(self, param: torch.Tensor) -> None:
        param.normal_(self._mean, self._std)


class Uniform(Initializer):
    def __init__(self, low: float = -1.0, high: float = 1.0, name: str | None = None) -> None:
        self._low, self._high = low, high

    def fill(self, param: torch.Tensor) -> None:
        param.uniform_(self._low, self._high)


class XavierUniform(Initializer):
    """Between -a and a, where a * a is 6 / (inputs + outputs); weights are (inputs, outputs)."""

    def fill(self, param: torch.Tensor) -> None:
        bound = math.sqrt(6 / (param.shape[0] + param.shape[1]))
        param.uniform_(-bound, bound)


__getattr__ = missing_names(__name__)
