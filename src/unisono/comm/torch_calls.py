"""With `--check`, the user's own torch.distributed calls are compared between ranks as the Communicator's are.

The functions are wrapped for as long as the world lasts. A call by the library itself or by torch passes through: the
one is checked where it is made, the other is torch's own affair.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.comm.log import UNEVEN, Log
from unisono.comm.watch import Watch

_INSIDE = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(torch.__file__))
_UNEVEN = ("all_gather", "gather", "all_to_all", "all_to_all_single")  # shapes may differ between ranks
_NAMES = (
    *("all_reduce", "broadcast", "reduce", "scatter", "barrier", "reduce_scatter", "reduce_scatter_tensor"),
    *("reduce_scatter_single", "all_gather_into_tensor", "all_gather_single"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *_UNEVEN,
)
_ROOTS = ("src", "dst", "group_src", "group_dst")


class TorchCalls:
    """Wraps torch.distributed's collectives so that every rank's next call is compared with the others'."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._groups_of: dict[tuple[int, ...], int] = {}
        self._originals = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}

    def wrap(self) -> None:
        for name, original in self._originals.items():
            self._put(name, self._wrapped(name, original))

    def unwrap(self) -> None:
        for name, original in self._originals.items():
            self._put(name, original)

    @staticmethod
    def _put(name: str, function: Callable[..., Any]) -> None:
        for module in (dist, distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, function)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith(_INSIDE):
                return original(*arguments, **options)
            given = signature.bind(*arguments, **options).arguments
            log = self._log_of(given.get("group"))
            if log is None or self._watch.check is None:
                return original(*arguments, **options)
            tensor = None if "object" in name else _first_tensor(given)
            log.enter(f"torch.distributed.{name}", _detail(name, given), tensor, 2)
            try:
                self._watch.check.agree(log)
                return original(*arguments, **options)
            finally:
                log.left = log.entered

        return call

    def _log_of(self, group: dist.ProcessGroup | None) -> Log | None:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        group = distributed_c10d._get_default_group() if group is None else group
        logs = self._watch.group_logs  # the user's calls are numbered together with a communicator's on its group
        if group not in logs:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups_of[ranks] = number = self._groups_of.get(ranks, 0) + 1
            logs[group] = self._watch.new_log(f"torch/{','.join(map(str, ranks))}#{number}", ranks)
        return logs[group]


def _detail(name: str, given: dict[str, Any]) -> str:
    """What must be equal on all ranks beside the tensor."""
    words = [UNEVEN] if name in _UNEVEN else []
    op = given.get("op")
    if op is not None and op != dist.ReduceOp.SUM:
        words.append(str(op).rsplit(".", maxsplit=1)[-1].lower())
    words += [f"root={given[root]}" for root in _ROOTS if given.get(root)]
    return " ".join(words)


def _first_tensor(given: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that a rank puts in, which comes second where the first is a list to receive in."""
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    return tensors[0] if tensors else None
