"""Parameter groups by name: `Engine(parameter_groups={...})`, and `grouped` for optimizers of tasks and own loops.

    make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)
    optimizer = uni.grouped(make, {"head.*": {"lr": 1e-3}, "*.bias|*.norm*": {"weight_decay": 0.0}})

optimizer(parameters) sees the parameters of one stage of a pipeline, in its own list: what group one belongs to must
not depend on that. So the list that unisono gives carries the names of the full model (`NamedParameters`), and every
rank makes all groups, also those of which it holds no member: checkpoints and schedulers find the same ones everywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError

Groups = Mapping[str, Mapping[str, Any]]
_SOME = 6  # names in a message


class NamedParameters(list[Any]):
    """A list of parameters that knows their names; "" for tensors that only try an optimizer."""

    def __init__(self, parameters: Iterable[torch.Tensor], names: Iterable[str] | None = None) -> None:
        super().__init__(parameters)
        self.names = [""] * len(self) if names is None else list(names)

    @classmethod
    def of(cls, model: nn.Module) -> NamedParameters:
        named = dict(model.named_parameters())
        return cls(named.values(), named)


class GroupedOptimizer:
    """optimizer(parameters) with groups by name. The first one has what no pattern matches, with the options that
    `make` gives; then one for each pattern, in their order. A parameter is of the first pattern that it matches."""

    def __init__(self, make: Callable[[Any], Optimizer], groups: Groups) -> None:
        self._make, self._groups = make, {pattern: dict(options) for pattern, options in groups.items()}

    def __call__(self, parameters: Iterable[Any]) -> Optimizer:
        given = parameters if isinstance(parameters, NamedParameters) else _named(parameters)
        members: dict[str, list[Any]] = {pattern: [] for pattern in ("", *self._groups)}
        for name, parameter in zip(given.names, given, strict=True):
            members[self.pattern_of(name)].append(parameter)
        made = self._make([{"params": each, **self._groups.get(pattern, {})} for pattern, each in members.items()])
        if isinstance(made, Optimizer):
            self._require_options(made)
        return made

    def pattern_of(self, name: str) -> str:
        """The pattern that decides about a parameter; "" if none does."""
        return next((pattern for pattern in self._groups if _matches(name, pattern)), "") if name else ""

    def require_members(self, names: Iterable[str]) -> None:
        """UsageError where a pattern has no parameter of the full model."""
        listed = list(names)
        used = {self.pattern_of(name) for name in listed}
        for pattern in self._groups:
            if pattern not in used:
                before = next((self.pattern_of(name) for name in listed if _matches(name, pattern)), None)
                if before is not None:
                    raise UsageError(
                        f"parameter_groups: all that {pattern!r} matches is in the group of {before!r}, which stands "
                        "before it; the first pattern that matches counts, so give the narrower one first"
                    )
                shown = ", ".join(listed[:_SOME]) + (", ..." if len(listed) > _SOME else "")
                raise UsageError(f"parameter_groups: {pattern!r} matches no parameter; the model has {shown}")

    def _require_options(self, made: Optimizer) -> None:
        for pattern, options in self._groups.items():
            for name in options:
                if name not in made.defaults:
                    near = difflib.get_close_matches(name, made.defaults, 1) or sorted(made.defaults)
                    raise UsageError(
                        f"parameter_groups: {pattern!r} sets {name!r}, which {type(made).__name__} does not have; "
                        f"expected one of its options, as {near[0]}"
                    )


def grouped(optimizer: Callable[[Any], Optimizer], groups: Groups) -> GroupedOptimizer:
    """An optimizer with parameter groups by name, the same under every plan.

    Args:
        optimizer: optimizer(parameters) returns a torch optimizer.
        groups: By patterns of names in the model ("head.*", or several: "*.bias|*.norm*"), options of the optimizer for
            the parameters that match, as {"lr": 1e-3}. The first pattern that matches counts; parameters that no
            pattern matches have the optimizer's own options.

    Returns:
        A function of parameters, for `optimizer=` of a Task, an Engine or parallelize.
    """
    if not callable(optimizer):
        raise UsageError(
            f"grouped({optimizer!r}, ...): expected a function, as lambda p: torch.optim.AdamW(p, lr=3e-4)"
        )
    is_mapping = isinstance(groups, Mapping) and bool(groups)
    if not is_mapping or not all(isinstance(key, str) and key for key in groups):
        raise UsageError(f'parameter_groups={groups!r}: expected options by patterns, as {{"head.*": {{"lr": 1e-3}}}}')
    for pattern, options in groups.items():
        if not isinstance(options, Mapping) or not options or not all(isinstance(name, str) for name in options):
            raise UsageError(f'parameter_groups: {pattern!r} has {options!r}; expected options, as {{"lr": 1e-3}}')
        if "params" in options:
            raise UsageError(f"parameter_groups: {pattern!r} sets params; the pattern says which parameters they are")
    return GroupedOptimizer(optimizer, groups)


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(name, each.strip()) for each in pattern.split("|"))


def _named(parameters: Iterable[Any]) -> NamedParameters:
    """Of a user's own call: pairs of name and parameter."""
    listed = list(parameters)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in listed):
        raise UsageError("an optimizer with groups by name was given parameters without names; use named_parameters()")
    return NamedParameters((parameter for _, parameter in listed), (name for name, _ in listed))
