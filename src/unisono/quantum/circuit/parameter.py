"""Angles of gates: numbers, trainable weights, inputs, and affine expressions of them.

circuit.ry(0, uq.weight(3)).rz(1, 2 * uq.feature(0) - uq.weight(1) / 2 + 0.1)
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError

Terms = tuple[tuple[int, float], ...]
_LARGEST = sys.float_info.max
_MOST = 1 << 24
_MOST_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Affine:
    """constant + sum of coefficient * weight[index] + sum of coefficient * feature[index].

    Terms are sorted by index and never carry a zero coefficient, so equal expressions compare equal.
    """

    constant: float = 0.0
    weights: Terms = ()
    features: Terms = ()

    def __post_init__(self) -> None:
        if not isinstance(self.constant, float | int) or not abs(self.constant) <= _LARGEST:
            raise UsageError(f"angle with the constant {self.constant!r}: expected a finite real number")
        if not (_are_terms(self.weights) and _are_terms(self.features)):
            raise UsageError(
                f"angle of weights {self.weights!r} and features {self.features!r}: expected pairs of an index and a "
                "finite number, as weight(i), feature(i) and sums of them have"
            )

    @property
    def is_constant(self) -> bool:
        return not self.weights and not self.features

    def evaluate(self, weights: Any = (), features: Any = ()) -> Any:
        """The value, given anything that can be indexed; a float when the entries are."""
        value: Any = self.constant
        for index, coefficient in self.weights:
            value = value + coefficient * weights[index]
        for index, coefficient in self.features:
            value = value + coefficient * features[index]
        return value

    def shifted(self, weights: int, features: int) -> Affine:
        """The same expression of weight i + `weights` and feature i + `features`."""
        return Affine(
            self.constant,
            tuple((index + weights, coefficient) for index, coefficient in self.weights),
            tuple((index + features, coefficient) for index, coefficient in self.features),
        )

    def __add__(self, other: Angle) -> Affine:
        right = affine(other)
        return Affine(
            self.constant + right.constant,
            _merge(self.weights, right.weights),
            _merge(self.features, right.features),
        )

    def __mul__(self, factor: SupportsFloat) -> Affine:
        if isinstance(factor, Affine):
            if not (factor.is_constant or self.is_constant):
                raise UsageError(f"({self}) * ({factor}) is not affine; an angle may only scale weights and features")
            return self * factor.constant if factor.is_constant else factor * self.constant
        number = _number(factor)
        return Affine(self.constant * number, _scale(self.weights, number), _scale(self.features, number))

    def __truediv__(self, divisor: SupportsFloat) -> Affine:
        if isinstance(divisor, Affine):
            raise UsageError(f"({self}) / ({divisor}) is not affine; an angle may only scale weights and features")
        number = _number(divisor)
        if not number:
            raise UsageError(f"({self}) / {divisor!r}: expected a divisor that is not zero")
        return self * (1.0 / number)

    def __neg__(self) -> Affine:
        return self * -1.0

    def __pos__(self) -> Affine:
        return self

    def __sub__(self, other: Angle) -> Affine:
        return self + -affine(other)

    def __rsub__(self, other: Angle) -> Affine:
        return -self + other

    def __rtruediv__(self, other: object) -> Affine:
        raise UsageError(f"{other!r} / ({self}) is not affine; an angle may only scale weights and features")

    __radd__ = __add__
    __rmul__ = __mul__

    def __str__(self) -> str:
        parts = []
        for symbol, terms in (("w", self.weights), ("x", self.features)):
            for index, coefficient in terms:
                scale = {1.0: "", -1.0: "-"}.get(coefficient, f"{coefficient:g}*")
                parts.append(f"{scale}{symbol}{index}")
        if self.constant or not parts:
            parts.append(f"{self.constant:.6g}")
        return "+".join(parts).replace("+-", "-")


Angle = Affine | SupportsFloat


def weight(index: int) -> Affine:
    """Entry `index` of the trainable weights."""
    return Affine(weights=((_index("weight", index), 1.0),))


def feature(index: int) -> Affine:
    """Entry `index` of one sample of the input."""
    return Affine(features=((_index("feature", index), 1.0),))


def affine(angle: Angle) -> Affine:
    """Any angle as an Affine; refuses what is not one finite real number."""
    return angle if isinstance(angle, Affine) else Affine(_number(angle))


def vector(kind: str, given: Any, needed: int, copy: bool = True) -> NDArray[np.float64]:
    """The weights or features of a circuit that reads `needed` of them, as numbers.

    What is given may change later: who keeps the numbers needs a copy."""
    if getattr(given, "requires_grad", False):
        raise UsageError(f"{kind} that need a gradient: give {kind}.detach(); uq.Layer is what gives gradients")
    try:
        plain = given.cpu() if hasattr(given, "cpu") else given
        numbers = np.asarray(plain)
        if numbers.dtype.kind in "cSU":
            raise ValueError(f"numbers of type {numbers.dtype}")
        numbers = numbers.astype(np.float64, copy=copy)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(f"{kind}: expected a vector of {needed} real numbers ({error})") from None
    if numbers.ndim != 1:
        raise UsageError(f"{kind} of shape {numbers.shape}: expected a vector of {needed} numbers")
    if len(numbers) != needed:
        raise UsageError(f"the circuit reads {needed} {kind}, but {len(numbers)} were given")
    return numbers


def finite_vector(kind: str, given: Any, needed: int, copy: bool = True) -> NDArray[np.float64]:
    """The same, refusing what is no finite number."""
    numbers = vector(kind, given, needed, copy)
    if not np.isfinite(numbers).all():
        at = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise UsageError(f"{kind}[{at}] is {numbers[at]}: expected finite numbers")
    return numbers


def is_index(value: Any) -> bool:
    """Whether it is a whole number; a tensor of 1.5 has the method that says so, and raises in it."""
    if type(value) is int:
        return True
    try:
        return operator.index(value) is not None and not isinstance(value, bool) and "bool" not in str(_dtype(value))
    except (TypeError, ValueError, RuntimeError):
        return False


def in_order(given: Any) -> tuple[Any, ...]:
    """What is given, one after the other; a TypeError for what has no order, and for texts and mappings."""
    if isinstance(given, str | bytes | Mapping | Set):
        raise TypeError(f"{type(given).__name__}s are no wires")
    return tuple(given)


def _dtype(value: Any) -> Any:
    return getattr(value, "dtype", None)


def require_seed(seed: int) -> int:
    if not is_index(seed) or not 0 <= seed < _MOST_SEEDS:
        raise UsageError(f"seed={seed!r}: expected a whole number of 0 or more, below 2^63")
    return int(seed)


def _are_terms(terms: Any) -> bool:
    try:
        return isinstance(terms, tuple) and all(
            is_index(index) and index >= 0 and abs(factor) <= _LARGEST for index, factor in terms
        )
    except (TypeError, ValueError, RuntimeError):
        return False


def _number(value: SupportsFloat) -> float:
    if getattr(value, "requires_grad", False):
        raise UsageError("an angle that needs a gradient is written weight(i) or feature(i), not as a tensor")
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a text")
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"angle {value!r}: expected one real number, weight(i), feature(i) or a sum of them") from None
    if not math.isfinite(number):
        raise UsageError(f"angle {value!r} is not finite: expected a finite number")
    return number


def _index(kind: str, index: int) -> int:
    if not is_index(index) or index < 0:
        raise UsageError(f"{kind}({index!r}): expected an index of 0 or more")
    if index >= _MOST:
        raise UsageError(f"{kind}({index}): at most {_MOST} of them are read, all up to the highest index being there")
    return int(index)


def _scale(terms: Terms, factor: float) -> Terms:
    return tuple((index, coefficient * factor) for index, coefficient in terms if coefficient * factor)


def _merge(left: Terms, right: Terms) -> Terms:
    if not right:
        return left
    merged: dict[int, float] = dict(left)
    for index, coefficient in right:
        merged[index] = merged.get(index, 0.0) + coefficient
    return _sorted(merged)


def _sorted(terms: Mapping[int, float]) -> Terms:
    return tuple((index, terms[index]) for index in sorted(terms) if terms[index])
