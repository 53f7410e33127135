"""Running a meta model with numbers, tensor by tensor: each gets its values for the operation that asks for them.

What a Shadow cannot run (a router sends tokens depending on values) still never needs the full model at once.
Within a MaterializeOnRead an operation on a meta tensor of a deferred-init model is done with the values that the
tensor will have, made for it and let go: beside what the model computes, the memory is that of the few tensors used
last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from unisono.mesh.deferred_init.deferred_model import DeferredModel, source_of, tensors_in
from unisono.parallel.meta.shadow import OnMeta
from unisono.torch_compat import no_torch_function

_KEPT = 2  # times the largest tensor: a layer of experts asks for the same tensors for each of them


class MaterializeOnRead(OnMeta):
    """For a copy of a deferred-init model."""

    def __init__(self, model: nn.Module, copy: nn.Module, device: torch.device) -> None:
        super().__init__(device)
        self._sources: dict[StorageWeakRef, tuple[DeferredModel, str]] = {}
        largest = 0
        for (_, tensor), (_, copied) in zip(tensors_in(model), tensors_in(copy), strict=True):
            source = source_of(tensor)
            if source is not None:
                self._sources[StorageWeakRef(copied.untyped_storage())] = source
                largest = max(largest, tensor.nbytes)
        self._room = _KEPT * largest
        self._materialized: OrderedDict[str, torch.Tensor] = OrderedDict()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with no_torch_function():
            args, kwargs = tree_map(self._real, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _real(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf
        source = self._sources.get(StorageWeakRef(leaf.untyped_storage()))
        if source is None:
            return leaf
        value = self._value(*source)
        assert value.shape == leaf.shape, "views of it are made by operations, which give views of the value"
        return value

    def _value(self, deferred: DeferredModel, name: str) -> torch.Tensor:
        if name not in self._materialized:
            value = deferred.value(name)
            while (
                self._materialized
                and sum(each.nbytes for each in self._materialized.values()) + value.nbytes > self._room
            ):
                self._materialized.popitem(last=False)
            self._materialized[name] = value
        self._materialized.move_to_end(name)
        return self._materialized[name]
