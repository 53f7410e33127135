"""Why a dataset does not fit its net: arguments in the wrong order, found in the program's own text.

A dataset is often a closure, `get_dataset(batch_size, in_dim, out_dim, steps)` that returns a generator. Where an op of
the net refuses what the generator yields, the call of that function is looked up in the source: an argument called
`var_in_dim` that is passed where the parameter is `out_dim`, while another parameter is `in_dim`, is out of its place.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.compat.language import say


@dataclass(frozen=True)
class MisplacedArguments:
    """A call whose arguments are named after other parameters than they are passed as."""

    function: str
    parameters: tuple[str, ...]
    arguments: tuple[str, ...]
    ordered: tuple[str, ...]  # as the signature has them
    values: dict[str, Any]
    line: str

    def __str__(self) -> str:
        wrong = [
            (self._shown(argument), parameter)
            for parameter, argument, right in zip(self.parameters, self.arguments, self.ordered, strict=True)
            if argument != right
        ]
        shown = [f"{argument} as {parameter}" for argument, parameter in wrong]
        listed = " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
        zh_listed = "、".join(f"把 {argument} 传给了 {parameter}" for argument, parameter in wrong)
        signature, right = (f"{self.function}({', '.join(names)})" for names in (self.parameters, self.ordered))
        return say(
            f"{signature} is called at {self.line} with {listed}; call {right}",
            f"{self.line} 处调用 {signature} 时{zh_listed}；应写作 {right}",
        )

    def _shown(self, argument: str) -> str:
        return f"{argument}={self.values[argument]!r}" if argument in self.values else argument


def misplaced_arguments(generator: Any) -> MisplacedArguments | None:
    """Of the call of the function that made a generator function; None where none is found, or all are in place."""
    function = _maker(generator)
    if function is None:
        return None
    parameters = tuple(inspect.signature(function).parameters)
    for file, call in _calls(function):
        arguments = tuple(each.id if isinstance(each, ast.Name) else "" for each in call.args)
        if call.keywords or len(arguments) != len(parameters) or not all(arguments):
            continue
        ordered = _ordered(parameters, arguments)
        if ordered is not None and ordered != arguments:
            known = function.__globals__
            values = {name: known[name] for name in arguments if isinstance(known.get(name), int | float | str)}
            line = f"{os.path.basename(file)}:{call.lineno}"
            return MisplacedArguments(function.__name__, parameters, arguments, ordered, values, line)
    return None


def _maker(generator: Any) -> Any:
    """The function of a module in which a function was defined."""
    outer, inside, _ = getattr(generator, "__qualname__", "").partition(".<locals>.")
    found = getattr(generator, "__globals__", {}).get(outer) if inside else None
    return found if inspect.isfunction(found) else None


def _calls(function: Any) -> Iterator[tuple[str, ast.Call]]:
    files = [function.__code__.co_filename, getattr(sys.modules.get("__main__"), "__file__", None)]
    for file in dict.fromkeys(filter(None, files)):
        try:
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function.__name__:
                yield file, node


def _ordered(parameters: tuple[str, ...], arguments: tuple[str, ...]) -> tuple[str, ...] | None:
    """The arguments in the order of the parameters that they are named after; None where a name says nothing, or two
    say the same."""
    places: dict[str, str] = {}
    for argument in arguments:
        named = [each for each in parameters if argument == each or argument.endswith(f"_{each}")]
        if not named:
            return None
        parameter = max(named, key=len)
        if parameter in places:
            return None
        places[parameter] = argument
    return tuple(places[parameter] for parameter in parameters)
