"""Double precision that stays double, also in models that ask for single.

Many models round on their way: norms, rotary tables, routers and softmaxes are computed in float32 "for safety", which
is right when the model is in bfloat16 and wrong when it is in float64: two float64 numbers that differ in the last bit
may round to two float32 numbers that differ in theirs, a billion times more. So a proof in float64 runs within

    with InDouble(torch.float64): ...

where every request for float32 is one for float64, and new tensors are float64 if nothing else is said. Models need not
know. For any other dtype it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class InDouble(TorchFunctionMode):
    """While active, float32 means float64; only where `dtype`, that of the model, is float64."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self._is_on = dtype == torch.float64
        self._default = torch.float32

    def __enter__(self) -> InDouble:
        if self._is_on:
            self._default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_on:
            super().__exit__(kind, error, trace)
            torch.set_default_dtype(self._default)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.Tensor.cfloat:  # type: ignore[attr-defined]
            return args[0].cdouble()
        if func is torch.empty_strided and str((kwargs or {}).get("device")) == "meta":
            return func(*args, **(kwargs or {}))  # torch's own copy, without data, of a tensor that is float32
        if any(isinstance(value, torch.dtype) for value in args):
            args = tuple(_wider(value) for value in args)
        if kwargs and any(isinstance(value, torch.dtype) for value in kwargs.values()):
            kwargs = {key: _wider(value) for key, value in kwargs.items()}
        return func(*args, **(kwargs or {}))


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64; in complex128 where it is complex, whose imaginary part float64 would drop."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
