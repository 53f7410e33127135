"""Double precision that stays double, also in models that ask for single.

Many models round on their way: norms, rotary tables, routers and softmaxes are computed in float32 "for safety", which
is right when the model is in bfloat16 and wrong when it is in float64: two float64 numbers that differ in the last bit
may round to two float32 numbers that differ in theirs, a billion times more. So a proof in float64 runs within

    with Float64Mode(torch.float64): ...

where every request for float32 is one for float64, and new tensors are float64 by default. Models need not
know. torch's grouped matrix product, with which Hugging Face's mixtures of experts run, has no float64 kernel: it is
replaced by the single products that it stands for. For any other dtype nothing happens. Functions of torch.jit.script
keep the dtypes that they were compiled with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from unisono.torch_compat import OpOverload

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Float64Mode(TorchFunctionMode):
    """While active, float32 means float64; only where `dtype`, that of the model, is float64."""

    in_graphs = True  # see parallel/compile/regions.py

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self._is_on = dtype == torch.float64
        self._default = torch.float32
        self.replaced: set[str] = set()  # kernels without float64

    def __enter__(self) -> Float64Mode:
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
        if isinstance(
            func, OpOverload
        ):  # in a dispatch mode: on behalf of a call that was here, or of a script function
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.Tensor.cfloat:  # type: ignore[attr-defined]
            return args[0].cdouble()
        if func in _GROUPED and _is_grouped_by_token(*args, **(kwargs or {})):
            self.replaced.add("grouped_mm")
            return _grouped_mm(*args, **(kwargs or {}))
        if func is torch.empty_strided and str((kwargs or {}).get("device")) == "meta":
            return func(*args, **(kwargs or {}))  # torch's own copy, without data, of a tensor that is float32
        if any(isinstance(value, torch.dtype) for value in args):
            args = tuple(_wider(value) for value in args)
        if kwargs and any(isinstance(value, torch.dtype) for value in kwargs.values()):
            kwargs = {key: _wider(value) for key, value in kwargs.items()}
        return func(*args, **(kwargs or {}))


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


_GROUPED = tuple(
    found
    for found in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if found is not None
)


def _is_grouped_by_token(
    tokens: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor | None = None, **_: Any
) -> bool:
    is_double = tokens.dtype == matrices.dtype == torch.float64
    return is_double and tokens.dim() == 2 and matrices.dim() == 3 and offs is not None


def _grouped_mm(
    tokens: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Rows up to offs[0] times the first matrix, from there to offs[1] times the second, and so on; zeros after that.
    Without data, only the shape is right."""
    if tokens.is_meta:
        products = tokens @ matrices.sum(0)
    else:
        ends = offs.tolist()
        starts = [0, *ends[:-1]]
        parts = [tokens[start:end] @ each for start, end, each in zip(starts, ends, matrices.unbind(), strict=True)]
        products = torch.cat([*parts, tokens.new_zeros(len(tokens) - ends[-1], matrices.shape[-1])])
    return products if bias is None else products + bias


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64; in complex128 where it is complex, whose imaginary part float64 would drop."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
