"""What is measured at the end of a circuit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any, Protocol

import torch

from unisono.compat.language import say
from unisono.compat.vqnet.nn.module import Module
from unisono.compat.vqnet.whole import whole_number
from unisono.errors import UsageError
from unisono.quantum.observables.observable import PauliSum, observable

_BY_WIRES = ("wires", "observables", "coefficient")


def _accepted() -> str:
    return say(
        'expected a Pauli string of I, X, Y, Z, each with its wire, such as "X5" or "X0 Z1", a dictionary of them '
        '{"X5": 1.0}, a dictionary of wires, observables and coefficient, or a list of these',
        '应为由 I、X、Y、Z 及其 wire 组成的字符串，如 "X5" 或 "X0 Z1"，或它们的字典 {"X5": 1.0}，'
        "或 wires、observables、coefficient 的字典，或以上的列表",
    )


class Measurable(Protocol):
    def measure(self, observables: tuple[PauliSum, ...]) -> torch.Tensor: ...


class MeasureAll(Module):
    """Expectation values: (samples, observables). A dictionary is one observable, the sum of its terms."""

    def __init__(self, obs: Any, name: str = "") -> None:
        super().__init__(name)
        several = isinstance(obs, list | tuple)
        if several and not obs:
            raise UsageError(say(f"MeasureAll(obs={obs!r}): {_accepted()}", f"MeasureAll(obs={obs!r})：{_accepted()}"))
        self.observables = tuple(_read(each) for each in (obs if several else [obs]))

    def forward(self, q_machine: Measurable) -> torch.Tensor:
        if not hasattr(q_machine, "measure"):
            raise UsageError(
                say(
                    f"MeasureAll: q_machine is a {type(q_machine).__name__}; expected a DistributeQMachine",
                    f"MeasureAll：q_machine 是 {type(q_machine).__name__}；应为 DistributeQMachine",
                )
            )
        return q_machine.measure(self.observables)


def _read(given: Any) -> PauliSum:
    if isinstance(given, Mapping) and set(given) & set(_BY_WIRES):
        return _by_wires(given)
    if isinstance(given, Mapping) and given:
        return reduce(add, [_term(word, coefficient) for word, coefficient in given.items()])
    if isinstance(given, str | PauliSum):
        return _term(given, 1.0)
    raise UsageError(say(f"MeasureAll(obs={given!r}): {_accepted()}", f"MeasureAll(obs={given!r})：{_accepted()}"))


def _term(word: Any, coefficient: Any) -> PauliSum:
    try:
        return float(coefficient) * observable(word)
    except UsageError as error:
        raise UsageError(
            say(
                f"MeasureAll: the key {word!r} of obs does not parse ({error}); {_accepted()}",
                f"MeasureAll：无法解析 obs 的键 {word!r}（{error}）；{_accepted()}",
            )
        ) from error
    except (TypeError, ValueError):
        raise UsageError(
            say(
                f"MeasureAll: the key {word!r} of obs has {coefficient!r}; expected a real number",
                f"MeasureAll：obs 的键 {word!r} 的系数为 {coefficient!r}；应为实数",
            )
        ) from None


def _by_wires(given: Mapping[str, Any]) -> PauliSum:
    """{"wires": [0, 2], "observables": ["X", "Y"], "coefficient": [1, 0.5]} is X0 + 0.5 Y2."""
    missing = [key for key in _BY_WIRES if key not in given]
    if missing:
        raise UsageError(
            say(
                f"MeasureAll: obs lacks the key {missing[0]!r}; expected {', '.join(_BY_WIRES)}",
                f"MeasureAll：obs 缺少键 {missing[0]!r}；应有 {', '.join(_BY_WIRES)}",
            )
        )
    unknown = [key for key in given if key not in _BY_WIRES]
    if unknown:
        raise UsageError(
            say(
                f"MeasureAll: unknown key {unknown[0]!r} of obs; expected {', '.join(_BY_WIRES)}",
                f"MeasureAll：obs 有未知的键 {unknown[0]!r}；应有 {', '.join(_BY_WIRES)}",
            )
        )
    columns = [_listed(given[key]) for key in _BY_WIRES]
    if not columns[0]:
        raise UsageError(
            say(
                f"MeasureAll(obs={dict(given)!r}): no wires; {_accepted()}",
                f"MeasureAll(obs={dict(given)!r})：没有 wires；{_accepted()}",
            )
        )
    if len({len(column) for column in columns}) != 1:
        lengths = ", ".join(
            say(f"{key} has {len(column)}", f"{key} 有 {len(column)} 个")
            for key, column in zip(_BY_WIRES, columns, strict=True)
        )
        raise UsageError(
            say(f"MeasureAll: {lengths}; expected as many of each", f"MeasureAll：{lengths}；个数应当相同")
        )
    return reduce(
        add, [_term(f"{str(kind).upper()}{_number(wire)}", factor) for wire, kind, factor in zip(*columns, strict=True)]
    )


def _number(wire: Any) -> Any:
    number = whole_number(wire)
    return wire if number is None else number


def _listed(value: Any) -> list[Any]:
    is_many = hasattr(value, "__iter__") and getattr(value, "ndim", 1) > 0 and not isinstance(value, str)
    return list(value) if is_many else [value]
