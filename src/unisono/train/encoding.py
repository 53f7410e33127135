"""State as JSON, with its tensors set apart under names: what a manifest holds in the place of a pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.errors import UsageError

Tensors = dict[str, torch.Tensor]


def encoded(value: Any, name: str, tensors: Tensors) -> Any:
    """The value for JSON; tensors in it go into `tensors`. Numbers, text, None, lists, tuples and dicts are known."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, list):
        return [encoded(each, f"{name}.{number}", tensors) for number, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encoded(each, f"{name}.{number}", tensors) for number, each in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [[_key(key, name), encoded(each, f"{name}.{key}", tensors)] for key, each in value.items()]
        return {"dict": pairs}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy's
        return value.item()
    raise UsageError(
        f"{name} is of type {type(value).__name__}, which a checkpoint does not hold; expected numbers, text, tensors, "
        "None, and lists, tuples and dicts of them"
    )


def _key(key: Any, name: str) -> Any:
    if not isinstance(key, bool | int | float | str):
        raise UsageError(f"{name} has a key of type {type(key).__name__}; expected text or a number")
    return key


def decoded(value: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """What `encoded` was given; `tensor_of` gives the tensor of a name."""
    if isinstance(value, list):
        return [decoded(each, tensor_of) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor_of(content)
    if kind == "tuple":
        return tuple(decoded(each, tensor_of) for each in content)
    return {key: decoded(each, tensor_of) for key, each in content}
