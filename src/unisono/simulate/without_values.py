"""Running a step whose parameters are on the meta device: shapes without memory.

What is computed from inputs alone has values, the rest has shapes (see parallel/meta/shadow.py). Where code reads a
value that does not exist, it gets an answer of the right kind: a scalar is 1, every element is nonzero, and indices are
spread evenly over their range, so that every expert is visited alike.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.mesh import bucket
from unisono.parallel.data import data_parallel as data
from unisono.parallel.data import reducer
from unisono.parallel.meta.shadow import DeviceView, OnMeta
from unisono.parallel.pipeline import stage
from unisono.parallel.zero import shards, units, zero
from unisono.torch_compat import assume_all_nonzero

_aten = torch.ops.aten
_DEVICE = torch.Tensor.device.__get__
_UNISONO = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODES = tuple(_UNISONO + name for name in ("simulate", "explain", os.path.join("parallel", "meta", "shadow.py")))
_ALLOCATING = {module.__file__ for module in (bucket, data, shards, reducer, units, zero, stage)}
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class WithoutValues(OnMeta):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._surface = _ValueQueries(device)
        self._nonzero = assume_all_nonzero()

    def __enter__(self) -> WithoutValues:
        self._nonzero.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._nonzero.__exit__(*error)

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if func is _aten._local_scalar_dense.default:
                return torch.ones((), dtype=first.dtype).item()
            if func is _aten.equal.default:
                return True
            if func is _aten.bincount.default:
                return _even_counts(first.numel(), kwargs.get("minlength", args[2] if len(args) > 2 else 1))
            if func is _aten.searchsorted.Tensor and first.ndim == 1:  # where the runs of sorted indices end
                return _even_counts(first.numel(), args[1].numel()).cumsum(0)
        return super().operate(func, args, kwargs)


def _even_counts(indices: int, most: int) -> torch.Tensor:
    each, more = divmod(indices, most)
    return torch.tensor([each + (number < more) for number in range(most)])


class _ValueQueries(DeviceView):
    """Code that allocates gradients and messages sees where a tensor is, so that these take no memory either."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _DEVICE and _is_asked_to_allocate():
            return func(*args)
        return super().__torch_function__(func, types, args, kwargs)


def _is_asked_to_allocate() -> bool:
    frame = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.startswith((_TORCH, *_MODES))
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename in _ALLOCATING
