"""Which tensors depend on which: watched while a model runs, whether or not gradients are recorded.

The pipeline has to know what flows from block to block (that travels between ranks) and what a model makes of its
inputs alone (that every rank makes for itself: masks, positions, rotary tables). Autograd knows only a part of it: it
is blind to integers, to frozen parameters and under no_grad. This looks at every operation instead: whatever has a
dependent input gives dependent outputs. It is slow and used for one pass of each kind only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from unisono.mesh.interception import LIKE_OPS, NEW_OPS, Interception
from unisono.torch_compat import has_storage

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
FORM_ONLY = LIKE_OPS | NEW_OPS  # ops whose result does not depend on the values of their tensors


class Dependence(Interception):
    """While active, follows what is computed from the tensors that were marked. Views of one memory count as one."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: set[StorageWeakRef] = set()  # weak, so that nothing lives longer for being watched

    def mark(self, tree: Any) -> None:
        """All tensors of the tree are dependent from now on."""
        self._memory.update(storages_of(tree))

    def __contains__(self, tensor: object) -> bool:
        return any(storage in self._memory for storage in storages_of(tensor))

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outcome = func(*args, **kwargs)
        if func.overloadpacket not in FORM_ONLY and (args, kwargs) in self:
            self.mark((outcome, _mutated(func, args, kwargs)))
        return outcome


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to, which are not always among its results (running statistics)."""
    if not func._schema.is_mutable:
        return []
    written = [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [args[index] if index < len(args) else kwargs.get(name) for index, name in written]


class Touch(Interception):
    """While active, calls `touched` with the memory of every operation's inputs."""

    def __init__(self, touched: Callable[[StorageWeakRef], None]) -> None:
        super().__init__()
        self._touched = touched

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for storage in storages_of((args, kwargs)):
            self._touched(storage)
        return func(*args, **kwargs)


def storages_of(tree: Any) -> list[StorageWeakRef]:
    """The memory of all tensors of a tree; of those that have none of their own (sparse ones), nothing.

    Asked for the arguments of every operation, so it knows the common kinds itself and asks pytrees for the rest only.
    """
    found = []
    pending = [tree]
    while pending:
        each = pending.pop()
        if isinstance(each, torch.Tensor):
            if has_storage(each):
                found.append(StorageWeakRef(each.untyped_storage()))
        elif type(each) in (tuple, list):
            pending.extend(each)
        elif type(each) is dict:
            pending.extend(each.values())
        elif type(each) not in _PLAIN:
            pending.extend(leaf for leaf in tree_leaves(each) if leaf is not each)
    return found
