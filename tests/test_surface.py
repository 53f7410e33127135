"""The names that `import unisono as uni` gives."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import unisono as uni


def test_every_name_is_there() -> None:
    for name in uni.__all__:
        assert getattr(uni, name) is not None
    assert uni.nn.MoE is not None
    assert uni.nn.ColumnParallelLinear is not None
    assert set(uni.__all__) <= set(dir(uni))


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        uni.paralelize  # noqa: B018


def test_the_command_does_not_import_torch_before_it_is_needed() -> None:
    """It would cost every launch, and every word of help, two seconds."""
    asked = "import sys, unisono.cli; print('torch' in sys.modules)"
    reported = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert reported.stdout == "False\n"


# Classes that unisono makes for its users, or that users derive from.
_NOT_CONSTRUCTED = {"Communicator", "Program", "StagedProgram", "StepInfo", "Trainer"}
_CIRCUITS = ("Circuit", "Layer", "evaluate", "expectations", "measured", "samples", "simulate", "trajectories")
_METHODS = ("fit", "evaluate", "predict", "save", "load", "save_pretrained", "run", "prepare", "dataloader")


def _documented() -> Iterator[tuple[str, Any]]:
    from unisono import quantum as uq

    for name in uni.__all__:
        made = getattr(uni, name)
        if getattr(made, "__module__", "").startswith("unisono.") and name not in _NOT_CONSTRUCTED and callable(made):
            yield f"uni.{name}", made
    yield from ((f"Engine.{name}", getattr(uni.Engine, name)) for name in _METHODS)
    yield from ((f"uq.{name}", getattr(uq, name)) for name in _CIRCUITS)


def test_the_parameters_of_public_functions_are_documented() -> None:
    """In Google's style, of which the API pages make tables."""
    for name, made in _documented():
        expected = [
            each.name
            for each in inspect.signature(made).parameters.values()
            if each.name != "self" and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        section = re.search(r"^Args:\n((?:    .*\n?)+)", inspect.getdoc(made) or "", re.MULTILINE)
        found = re.findall(r"^    (\w+): ", section[1] if section else "", re.MULTILINE)
        assert found == expected, name
