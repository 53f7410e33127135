"""The `args` dictionaries of VQNet's wrappers, read strictly: a key that would be passed over is an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch.optim import Optimizer

from unisono.compat.language import say
from unisono.errors import UsageError

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


class Settings:
    """A dictionary whose keys are known: `known` has what each takes."""

    def __init__(self, where: str, given: Any, known: Mapping[str, str]) -> None:
        self._where, self._known = where, known
        if not isinstance(given, Mapping):
            raise UsageError(
                say(
                    f"{where}: expected a dictionary of {self._listed}, not a {type(given).__name__}",
                    f"{where}：应为 {self._listed} 的字典，而不是 {type(given).__name__}",
                )
            )
        unknown = [key for key in given if key not in known]
        if unknown:
            raise UsageError(
                say(
                    f"{where}: unknown key {unknown[0]!r}; known are {self._listed}",
                    f"{where}：未知的键 {unknown[0]!r}；已知的键为 {self._listed}",
                )
            )
        self._given = given

    @property
    def _listed(self) -> str:
        return say(", ".join(f"{key} ({what})" for key, what in self._known.items()), "、".join(self._known))

    def need(self, key: str) -> Any:
        if key not in self._given:
            raise UsageError(
                say(
                    f"{self._where}: the key {key!r} ({self._known[key]}) is missing; known are {self._listed}",
                    f"{self._where}：缺少键 {key!r}；已知的键为 {self._listed}",
                )
            )
        return self._given[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._given.get(key, default)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; without a default it is needed."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise UsageError(
                say(
                    f"{self._where}: {key}={value!r}; expected a whole number of at least {least}",
                    f"{self._where}：{key}={value!r}；应为不小于 {least} 的整数",
                )
            )
        return int(value)

    def norm(self, key: str) -> float | None:
        """A number above zero, or None where it is not given."""
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not (isinstance(value, Real) and float(value) > 0)):
            raise UsageError(
                say(
                    f"{self._where}: {key}={value!r}; expected a number above 0",
                    f"{self._where}：{key}={value!r}；应为大于 0 的数",
                )
            )
        return None if value is None else float(value)


def optimizer_of(where: str, given: Any) -> Callable[[Any], Optimizer]:
    """What makes the optimizer that a dictionary {"type": "Adam", "params": {"lr": 0.001}} describes."""
    where = f"{where}, optimizer"
    settings = Settings(where, given, {"type": " | ".join(OPTIMIZERS), "params": "its arguments, such as lr"})
    name = settings.need("type")
    kind = OPTIMIZERS.get(name.lower()) if isinstance(name, str) else None
    if kind is None:
        raise UsageError(
            say(
                f"{where}: type {name!r} is unknown; expected one of {', '.join(OPTIMIZERS)}",
                f"{where}：未知的 type {name!r}；应为 {', '.join(OPTIMIZERS)} 之一",
            )
        )
    taken = [key for key in inspect.signature(kind).parameters if key != "params"]
    options = settings.get("params", {})
    Settings(f"{where}, params of {name}", options, dict.fromkeys(taken, "as torch's"))

    def make(parameters: Any) -> Optimizer:
        return kind(parameters, **options)

    _require_accepted(f"{where}, params of {name}", kind, options)
    return make


def _require_accepted(where: str, kind: Callable[..., Optimizer], options: Mapping[str, Any]) -> None:
    """Refuse values that torch refuses; where one is to blame, it is named."""
    refusal = _refusal(kind, options)
    if refusal is None:
        return
    alone = {key: reason for key in options if (reason := _refusal(kind, {key: options[key]})) is not None}
    shown = {key: options[key] for key in (list(alone)[:1] or options)}
    listed = ", ".join(f"{key}={value!r}" for key, value in shown.items())
    raise UsageError(
        say(
            f"{where}: {listed} is refused: {next(iter(alone.values()), refusal)}; expected values as torch's",
            f"{where}：{listed} 被拒绝：{next(iter(alone.values()), refusal)}；取值应与 torch 的相同",
        )
    )


def _refusal(kind: Callable[..., Optimizer], options: Mapping[str, Any]) -> str | None:
    try:
        kind([torch.nn.Parameter(torch.zeros(()))], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return None
