"""Blocks in which every operation on tensors, or the arguments of every autograd function, pass through one method."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Function

from unisono.torch_compat import TorchDispatchMode
from unisono.torch_patches import patched

_aten = torch.ops.aten
# Ops that use a tensor for its shape, dtype and device only.
LIKE_OPS = frozenset(
    (
        _aten.empty_like,
        _aten.zeros_like,
        _aten.ones_like,
        _aten.full_like,
        _aten.rand_like,
        _aten.randn_like,
        _aten.randint_like,
    )
)
NEW_OPS = frozenset((_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full))  # these, its dtype and device


class Interception(TorchDispatchMode):
    """In a `with` block of it, `operate` is called instead of every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes seconds, to keep away from it

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.operate(func, args, kwargs or {})

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation; subclasses change how."""
        return func(*args, **kwargs)


@contextlib.contextmanager
def function_arguments(change: Callable[[Any], Any]) -> Iterator[None]:
    """In the block, autograd functions are applied to change(argument) of each argument. torch's modes do not see
    them, so kernels that come as such functions would get tensors that are not what they appear to be."""
    plain = vars(Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return plain.__get__(None, cls)(*map(change, args), **kwargs)

    with patched(Function, "apply", classmethod(apply), why="arguments of autograd functions pass no mode of torch"):
        yield
