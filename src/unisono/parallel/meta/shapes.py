"""Shapes that are known already: what an operation on meta tensors gives is worked out once.

Torch works out most shapes in Python, and takes milliseconds for a layer norm that has no numbers. A model's blocks ask
for the same again and again, and a pipeline's rehearsal does for each stage; within a `KnownShapes` the second answer
has the form of the first.

Note: what may be remembered. The form of the outputs must follow from the key: the operation, the forms of its tensors,
and its other arguments, with their types (True, 1 and 1.0 are equal in Python, and promote differently). So operations
that write, that give views or that may hand back an input are always carried out, and those that take anything unusual.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch

from unisono.mesh.interception import Interception
from unisono.torch_compat import no_torch_function

_MOST = 20_000  # forms are a few hundred bytes each
_META = torch.device("meta")
_PLAIN = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_empty_strided = torch.ops.aten.empty_strided.default

Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_known: dict[Hashable, tuple[type | None, tuple[Form, ...]]] = {}


class KnownShapes(Interception):
    """In a `with` block of it, operations on meta tensors alone cost little."""

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _gives_new_tensors(func):
            return func(*args, **kwargs)
        with no_torch_function():
            key = _key(func, args, kwargs)
            if key is None:
                return func(*args, **kwargs)
            found = _known.get(key)
            if found is None:
                outcome = func(*args, **kwargs)
                _remember(key, outcome, args)
                return outcome
            container, forms = found
            tensors = [_empty_strided(*form[:2], dtype=form[2], device=_META) for form in forms]
            return tensors[0] if container is None else container(tensors)


@functools.cache
def _gives_new_tensors(func: Any) -> bool:
    """Whether the operation writes to nothing and its outputs are no views."""
    schema = func._schema
    return (
        func.namespace == "aten"
        and bool(schema.returns)
        and all(each.alias_info is None for each in (*schema.arguments, *schema.returns))
        and torch.Tag.data_dependent_output not in func.tags
        and torch.Tag.dynamic_output_shape not in func.tags
    )


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    parts: list[Any] = [func, torch.get_default_dtype()]
    is_known = _describe(args, parts) and all(_describe((name, value), parts) for name, value in kwargs.items())
    return tuple(parts) if is_known else None


def _describe(values: Any, parts: list[Any]) -> bool:
    """Whether all of them could be found in the parts."""
    parts.append(len(values))
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if value.device != _META or value.layout != torch.strided or value.is_conj() or value.is_neg():
                return False
            parts.extend((value.shape, value.stride(), value.dtype))
        elif kind in _PLAIN:
            parts.extend((kind, value))
        elif kind not in (list, tuple) or not _describe(value, parts):
            return False
    return True


def _remember(key: Hashable, outcome: Any, args: tuple[Any, ...]) -> None:
    container = None if isinstance(outcome, torch.Tensor) else type(outcome)
    outputs = [outcome] if container is None else outcome
    if container not in (None, tuple, list) or not all(_is_new(each, args) for each in outputs):
        return
    if len(_known) >= _MOST:
        _known.clear()
    _known[key] = container, tuple((each.shape, each.stride(), each.dtype) for each in outputs)


def _is_new(output: Any, args: tuple[Any, ...]) -> bool:
    return (
        type(output) is torch.Tensor
        and output.device == _META
        and output.layout == torch.strided
        and output.storage_offset() == 0
        and not any(output is each for each in args)
    )
