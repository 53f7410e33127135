"""What is measured at the end of a circuit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any, Protocol

import torch

from unisono.compat.vqnet.nn.module import Module
from unisono.compat.vqnet.whole import whole_number
from unisono.errors import UsageError
from unisono.quantum.observables.observable import PauliSum, observable

_BY_WIRES = ("wires", "observables", "coefficient")
_ACCEPTED = (
    'expected a string of letters I, X, Y, Z, each with its wire, such as "X5" or "X0 Z1", a dictionary of them '
    '{"X5": 1.0}, a dictionary of wires, observables and coefficient, or a list of these'
)


class Measurable(Protocol):
    def measure(self, observables: tuple[PauliSum, ...]) -> torch.Tensor: ...


class MeasureAll(Module):
    """Expectation values: (samples, observables). A dictionary is one observable, the sum of its terms."""

    def __init__(self, obs: Any, name: str = "") -> None:
        super().__init__(name)
        several = isinstance(obs, list | tuple)
        if several and not obs:
            raise UsageError(f"MeasureAll(obs={obs!r}): {_ACCEPTED}")
        self.observables = tuple(_read(each) for each in (obs if several else [obs]))

    def forward(self, q_machine: Measurable) -> torch.Tensor:
        if not hasattr(q_machine, "measure"):
            raise UsageError(f"MeasureAll: q_machine is a {type(q_machine).__name__}; expected a DistributeQMachine")
        return q_machine.measure(self.observables)


def _read(given: Any) -> PauliSum:
    if isinstance(given, Mapping) and set(given) & set(_BY_WIRES):
        return _by_wires(given)
    if isinstance(given, Mapping) and given:
        return reduce(add, [_term(word, coefficient) for word, coefficient in given.items()])
    if isinstance(given, str | PauliSum):
        return _term(given, 1.0)
    raise UsageError(f"MeasureAll(obs={given!r}): {_ACCEPTED}")


def _term(word: Any, coefficient: Any) -> PauliSum:
    try:
        return float(coefficient) * observable(word)
    except UsageError as error:
        raise UsageError(f"MeasureAll: the key {word!r} of obs does not parse ({error}); {_ACCEPTED}") from error
    except (TypeError, ValueError):
        raise UsageError(f"MeasureAll: the key {word!r} of obs has {coefficient!r}; expected a real number") from None


def _by_wires(given: Mapping[str, Any]) -> PauliSum:
    """{"wires": [0, 2], "observables": ["X", "Y"], "coefficient": [1, 0.5]} is X0 + 0.5 Y2."""
    missing = [key for key in _BY_WIRES if key not in given]
    if missing:
        raise UsageError(f"MeasureAll: obs lacks the key {missing[0]!r}; expected {', '.join(_BY_WIRES)}")
    strangers = [key for key in given if key not in _BY_WIRES]
    if strangers:
        raise UsageError(f"MeasureAll: unknown key {strangers[0]!r} of obs; expected {', '.join(_BY_WIRES)}")
    columns = [_listed(given[key]) for key in _BY_WIRES]
    if not columns[0]:
        raise UsageError(f"MeasureAll(obs={dict(given)!r}): no wires; {_ACCEPTED}")
    if len({len(column) for column in columns}) != 1:
        lengths = ", ".join(f"{key} has {len(column)}" for key, column in zip(_BY_WIRES, columns, strict=True))
        raise UsageError(f"MeasureAll: {lengths}; expected as many of each")
    return reduce(
        add, [_term(f"{str(kind).upper()}{_number(wire)}", factor) for wire, kind, factor in zip(*columns, strict=True)]
    )


def _number(wire: Any) -> Any:
    number = whole_number(wire)
    return wire if number is None else number


def _listed(value: Any) -> list[Any]:
    is_many = hasattr(value, "__iter__") and getattr(value, "ndim", 1) > 0 and not isinstance(value, str)
    return list(value) if is_many else [value]
