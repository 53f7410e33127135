"""How much of what a piece of code allocates is still there afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """While active, notes the memory that operations make; `alive` are the bytes that are not freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        outcome = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outcome):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in before:
                self._sizes[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        return outcome

    @property
    def alive(self) -> int:
        return sum(size for storage, size in self._sizes.items() if not storage.expired())
