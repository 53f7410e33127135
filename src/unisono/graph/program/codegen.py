"""The program of a rank as a Python function: one line an instruction, every callee bound beforehand.

There is no interpreter and no look-up left when it runs. A value is let go of after its last use, so that it lives no
longer than in a plain model.
"""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from unisono.graph.program.lowering import Compute, Lowered, Redistribute
from unisono.graph.rules import tensors_of

_numbers = itertools.count(1)

Function = Callable[..., Any]


def generate(
    lowered: Lowered, callees: Mapping[str, Function], device: torch.device | None = None
) -> tuple[Function, str]:
    """The function from what is given (in order) to the outputs and then the buffers' new values, and its source.

    callees: for each instruction, by its name, the function that does it on local tensors. device: where the program
    runs, if not where it was traced.
    """
    names: dict[str, Any] = {}
    lines = [f"def program({', '.join(_variable(name) for name in lowered.given)}):"]
    for instruction, dead in zip(lowered.instructions, _last_uses(lowered), strict=True):
        names[f"f_{instruction.name}"] = callees[instruction.name]
        lines.append(f"    {_line(instruction, names, device)}")
        if dead:
            lines.append(f"    del {', '.join(map(_variable, dead))}")
    outputs = ", ".join("None" if name is None else _variable(name) for name in _returned(lowered))
    lines.append(f"    return [{outputs}]")
    source = "\n".join(lines) + "\n"
    return _executed(source, names), source


def _executed(source: str, names: dict[str, Any]) -> Function:
    file = f"<unisono program {next(_numbers)}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # for tracebacks
    exec(compile(source, file, "exec"), names)
    made: Function = names["program"]
    return made


def _line(instruction: Redistribute | Compute, names: dict[str, Any], device: torch.device | None) -> str:
    made, callee = _variable(instruction.name), f"f_{instruction.name}"
    if isinstance(instruction, Redistribute):
        return f"{made} = {callee}({_variable(instruction.source)})"
    if instruction.is_item:
        return f"{made} = {_variable(instruction.inputs[0])}[{instruction.node.args[1]}]"
    values = iter(instruction.inputs)

    def written(value: Any) -> str:
        if isinstance(value, fx.Node):
            return _variable(next(values) if tensors_of(value.meta.get("val")) else value.name)
        if isinstance(value, list | tuple):
            inside = ", ".join(written(each) for each in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
        return _constant(device if isinstance(value, torch.device) and device is not None else value, names)

    words = [written(value) for value in instruction.node.args]
    words += [f"{key}={written(value)}" for key, value in instruction.node.kwargs.items()]
    return f"{made} = {callee}({', '.join(words)})"


def _constant(value: Any, names: dict[str, Any]) -> str:
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    name = f"c_{len(names)}"
    names[name] = value
    return name


def _variable(name: str) -> str:
    return f"v_{name}"


def _returned(lowered: Lowered) -> list[str | None]:
    return [*lowered.outputs, *lowered.changed.values()]


def _last_uses(lowered: Lowered) -> list[list[str]]:
    """For each instruction, the values that nothing after it needs."""
    needed = {name for name in (*_returned(lowered), *lowered.given) if name is not None}
    dead: list[list[str]] = []
    for instruction in reversed(lowered.instructions):
        used = [instruction.source] if isinstance(instruction, Redistribute) else _used(instruction)
        gone = [name for name in dict.fromkeys((*used, instruction.name)) if name not in needed]
        needed.update(gone)
        dead.append(gone)
    return dead[::-1]


def _used(instruction: Compute) -> list[str]:
    others = [node.name for node in instruction.node.all_input_nodes if not tensors_of(node.meta.get("val"))]
    return [*instruction.inputs, *others]
