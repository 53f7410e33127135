"""Shells: parameters with a shape and no values yet, while an optimizer is made for them.

ZeRO's third stage makes the optimizer first, from all parameters, and then the values, one parameter at a time. An
optimizer that looks at values while it is made (to keep a copy of the initial ones, for example) would see nothing. So,
within `materialized`, each operation that reads a shell is computed with the values that the parameter will have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from unisono.errors import UsageError
from unisono.mesh.interception import Interception
from unisono.parallel.pipeline.dependence import FORM_ONLY
from unisono.torch_compat import has_storage


class MaterializedShells(Interception):
    """In the block, shells have values for whoever reads them."""

    def __init__(
        self, shells: Mapping[str, nn.Parameter], value: Callable[[str, nn.Parameter], torch.Tensor], what: str
    ) -> None:
        """`value` makes a shell's values, by its name; `what` is at work in the block, and is notified where it
        writes."""
        super().__init__()
        self._names = {StorageWeakRef(shell.untyped_storage()): name for name, shell in shells.items()}
        self._handed: dict[StorageWeakRef, str] = {}  # values, for what they are of
        self._shells = shells
        self._value = value
        self._what = what

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.is_mutable:
            self._require_unwritten(func, args, kwargs)
        if func.overloadpacket not in FORM_ONLY:
            args, kwargs = tree_map(self._real, (args, kwargs))
        return func(*args, **kwargs)

    def _real(self, leaf: Any) -> Any:
        name = _found(leaf, self._names)
        if name is None:
            return leaf
        assert leaf.shape == self._shells[name].shape, "views of it are made by operations, on its values"
        value = self._value(name, self._shells[name])
        self._handed[StorageWeakRef(value.untyped_storage())] = name
        return value

    def _require_unwritten(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {argument.name: each for argument, each in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for leaf in tree_leaves(given.get(argument.name)):
                name = _found(leaf, self._names) or _found(leaf, self._handed)
                if name is not None:
                    raise UsageError(
                        f"{self._what} changes {name} while it is made, but under zero=3 a model that a function "
                        "builds has no values then; change it in the function, or use zero=2"
                    )


def _found(leaf: Any, names: Mapping[StorageWeakRef, str]) -> str | None:
    if not isinstance(leaf, torch.Tensor) or not has_storage(leaf):
        return None
    return names.get(StorageWeakRef(leaf.untyped_storage()))
