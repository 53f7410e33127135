"""The inputs of a model as a user gives them: one tensor, a tuple of arguments, or a dict of named ones."""

from __future__ import annotations

from typing import Any

from torch import nn


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
