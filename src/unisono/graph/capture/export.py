"""Capturing a model's ops with torch.export, and errors for users where it cannot be done."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from unisono.errors import UsageError
from unisono.graph.capture.source import failing_line, line_of
from unisono.graph.rules.call import tensors_of

_WITHOUT = (
    "Plans that are applied to the model itself (uni.parallelize with dp, zero, tp with rules, cp, pp) need no trace."
)
_SAME_OPS = "A graph holds the same ops for every batch. " + _WITHOUT
_CONSTRUCTS = {
    "if": "a branch",
    "elif": "a branch",
    "while": "a loop",
    "for": "a loop",
    "assert": "an assertion",
}


def captured(step: nn.Module, given: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """The ops of step(*given); UsageError where they depend on values, with the construct and its line."""
    try:
        with _quiet():
            program = torch.export.export(step, given, strict=False)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(_why(error)) from error
    _require_sizes(program.graph)
    return program


def _why(error: Exception) -> str:
    where, line = failing_line(error.__traceback__)
    at = f" at {where}: `{line}`" if where else ""
    if isinstance(error, GuardOnDataDependentSymNode):
        hint = " (a Hugging Face mixture can be traced with experts_implementation='grouped_mm')" * ("expert" in line)
        return f"the model cannot be traced{at}: {_construct(line)} depends on the values of tensors{hint}. {_SAME_OPS}"
    reason = str(error).strip().splitlines()[0][:300].rstrip(".") if str(error).strip() else type(error).__name__
    if ".numpy()" in reason:
        return f"the model cannot be traced{at}: it takes the values of a tensor out of torch. {_SAME_OPS}"
    return (
        f"the model cannot be traced{at}: {type(error).__name__}: {reason}. If it fails so on a batch too, fix that; "
        f"a branch, a loop or a shape that depends on the values of tensors cannot be in a graph. {_WITHOUT}"
    )


def _construct(line: str) -> str:
    word = re.match(r"\w*", line)
    return _CONSTRUCTS.get(word[0] if word else "", "a number")


def _require_sizes(graph: fx.Graph) -> None:
    """Tensors whose sizes depend on the values of others (x[x > 0], nonzero, unique) have none in a graph."""
    for node in graph.nodes:
        for tensor in tensors_of(node.meta.get("val")):
            if any(isinstance(size, torch.SymInt) for size in tensor.shape):
                raise UsageError(
                    f"the model cannot be traced at {line_of(node) or node.name}: how large the result of "
                    f"{str(node.target).removesuffix('.default')} is depends on the values of tensors. {_SAME_OPS}"
                )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch prints the graph that it has so far, and logs, where an export fails; what others print stays."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch")]
    loud = [logger for logger in map(logging.getLogger, names) if not logger.disabled]
    held = io.StringIO()
    dumped = ""
    for logger in loud:
        logger.disabled = True
    try:
        with contextlib.redirect_stderr(held), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s)The tensor attributes? .* assigned during export")
            yield
    except Exception as error:
        dumped = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        for logger in loud:
            logger.disabled = False
        printed = held.getvalue()
        sys.stderr.write(printed.replace(dumped, "") if dumped.strip() else printed)
