"""Normal numbers from uniform ones, with the same bits on every CPU, and to rounding on GPUs (which fuse operations).

Logarithm and sine differ in their last bits from one device's library to another's, so they are made here of sums,
products, quotients and square roots alone, which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import math

import torch

_LOG_TERMS = 12
_TURN_TERMS = 9


def from_uniform(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Box and Muller's way: float64 numbers in [0, 1) become normal ones."""
    return _sqrt_of(-2 * log(1 - first)) * cos_turn(second)


def _sqrt_of(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(x.clamp_min(0.0))


def log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of positive numbers: of the exponent, and of the rest m as 2 artanh((m - 1) / (m + 1))."""
    rest, exponent = torch.frexp(x)
    small = rest < math.sqrt(0.5)
    rest = torch.where(small, rest * 2, rest)
    exponent = exponent.double() - small.double()
    ratio = (rest - 1) / (rest + 1)
    square = ratio * ratio
    series = torch.full_like(x, 1 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, -1, -1):
        series = series * square
        series = series + 1 / (2 * term + 1)
    return exponent * math.log(2) + 2 * ratio * series


def cos_turn(x: torch.Tensor) -> torch.Tensor:
    """cos(2 pi x) for x in [0, 1), from Taylor's series of cosine and sine on an eighth of a turn."""
    x = torch.where(x > 0.5, 1 - x, x)  # the other half mirrors
    sign = torch.where(x > 0.25, -1.0, 1.0).to(x.dtype)
    x = torch.where(x > 0.25, 0.5 - x, x)
    angle = torch.where(x > 0.125, 0.25 - x, x) * (2 * math.pi)
    square = angle * angle
    cosine = _alternating(square, 0)
    sine = angle * _alternating(square, 1)
    return sign * torch.where(x > 0.125, sine, cosine)


def _alternating(square: torch.Tensor, first: int) -> torch.Tensor:
    """The sum over k of (-square)**k / (2 k + first)!"""
    total = torch.full_like(square, (-1) ** _TURN_TERMS / math.factorial(2 * _TURN_TERMS + first))
    for term in range(_TURN_TERMS - 1, -1, -1):
        total = total * square
        total = total + (-1) ** term / math.factorial(2 * term + first)
    return total
