"""What every reduction means for every dtype, whichever backend carries it.

A backend knows a few reductions on a few dtypes. A `Reduction` defines how to bring a tensor into such a form
(the *wire*), which plain reduction to run there, and how to bring the outcome back, rounding once:

    reduction = plan_reduction("avg", torch.bfloat16)
    wire = reduction.to_wire(tensor)                      # float32
    backend.all_reduce(wire, reduction.wire_op)           # a plain sum
    reduction.from_wire(wire, tensor, world_size)         # divided, then rounded to bfloat16
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch

from unisono.errors import UsageError

OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
OTHER_NAMES = {"prod": "product"}  # as Paddle, MindSpore and NumPy say

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
FLOATS = HALF_DTYPES | {torch.float32, torch.float64}
INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
COMPLEXES = frozenset({torch.complex64, torch.complex128})
DTYPES = FLOATS | INTEGERS | COMPLEXES | {torch.bool}

Factor = float | complex | torch.Tensor

MEANINGFUL = {  # the dtypes for which each op has a meaning
    "sum": DTYPES,
    "avg": DTYPES - {torch.bool},
    "product": DTYPES,
    "min": DTYPES - COMPLEXES,
    "max": DTYPES - COMPLEXES,
    "band": INTEGERS | {torch.bool},
    "bor": INTEGERS | {torch.bool},
    "bxor": INTEGERS | {torch.bool},
    "premul_sum": FLOATS | COMPLEXES,
}
# On bytes that are 0 or 1, "or" is the maximum and "and" is the minimum.
_BOOL_OP = {
    "sum": "max",
    "max": "max",
    "bor": "max",
    "product": "min",
    "min": "min",
    "band": "min",
    "bxor": "bxor",
}
_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class Reduction:
    """How one op on one dtype is carried out; get one from `plan_reduction`."""

    op: str
    dtype: torch.dtype
    wire_dtype: torch.dtype
    wire_op: str  # sum, product, min, max, band, bor or bxor

    @cached_property
    def is_plain(self) -> bool:
        """Whether a tensor can travel as it is and arrives finished."""
        return self.wire_dtype == self.dtype and self.wire_op == self.op

    def to_wire(self, tensor: torch.Tensor, factor: Factor | None = None) -> torch.Tensor:
        """The tensor in wire form. Shares memory with `tensor` where it can, and never changes it.

        A complex tensor that travels as real numbers gets a last dimension of 2.
        """
        if tensor.dtype != self.dtype:
            raise UsageError(f"a reduction of {self.dtype} tensors was given one of {tensor.dtype}")
        self.require_factor(tensor, factor)
        if self.is_plain:
            return tensor
        if self.op == "premul_sum":
            return self._premultiplied(tensor, factor)
        if self.dtype == torch.bool:
            return tensor.view(torch.uint8)
        if self._travels_as_reals:
            return torch.view_as_real(tensor.resolve_conj())
        return tensor.to(self.wire_dtype)

    def landing(self, out: torch.Tensor) -> torch.Tensor:
        """Memory in wire form for what will become `out`: out's own where it can be, else new."""
        if self.dtype == torch.bool:
            return out.view(torch.uint8)
        if self._travels_as_reals and not out.is_conj():
            return torch.view_as_real(out)
        if self._travels_as_reals:
            return torch.empty(*out.shape, 2, dtype=self.wire_dtype, device=out.device)
        return out if self.wire_dtype == self.dtype else torch.empty_like(out, dtype=self.wire_dtype)

    def from_wire(self, wire: torch.Tensor, out: torch.Tensor, size: int) -> None:
        """Write what arrived into `out`, given that `size` ranks took part. Uses `wire` up.

        `wire` holds out's elements in order; its shape is free. Where it is out's own memory, it stays there.
        """
        if out.numel() == 0:
            return
        if self.op == "avg":
            wire.div_(size, rounding_mode="trunc" if self.dtype in INTEGERS else None)
        if wire.data_ptr() == out.data_ptr():
            return
        if self._travels_as_reals:
            out.copy_(torch.view_as_complex(wire.reshape(*out.shape, 2)))
        else:
            out.copy_(wire.reshape(out.shape))

    @property
    def _travels_as_reals(self) -> bool:
        return self.dtype in COMPLEXES and self.wire_dtype not in COMPLEXES

    def require_factor(self, tensor: torch.Tensor, factor: Factor | None) -> None:
        """UsageError where the factor is missing, unused, or would change the tensor's dtype or shape."""
        if self.op != "premul_sum":
            if factor is not None:
                raise UsageError(f"{self.op} takes no factor; use op='premul_sum' to multiply before the sum")
            return
        if factor is None:
            raise UsageError("premul_sum was given no factor; pass the number to multiply by before the sum")
        if not isinstance(factor, (int, float, complex, torch.Tensor)):
            raise UsageError(f"premul_sum was given the factor {factor!r}; expected a number or a tensor")
        is_complex = factor.is_complex() if isinstance(factor, torch.Tensor) else isinstance(factor, complex)
        if is_complex and self.dtype not in COMPLEXES:
            raise UsageError(f"premul_sum was given a complex factor for {self.dtype}; pass a real one")
        if isinstance(factor, torch.Tensor) and not _fits(factor.shape, tensor.shape):
            raise UsageError(
                f"premul_sum was given a factor of shape {tuple(factor.shape)} for a tensor of shape "
                f"{tuple(tensor.shape)}; pass one number, or as many as the tensor has"
            )

    def _premultiplied(self, tensor: torch.Tensor, factor: Factor | None) -> torch.Tensor:
        assert factor is not None
        if isinstance(factor, torch.Tensor):
            factor = factor.to(tensor.device)
        if self._travels_as_reals:
            return torch.view_as_real(torch.mul(tensor, factor).to(self.dtype).resolve_conj())
        return torch.mul(tensor.to(self.wire_dtype), factor).to(self.wire_dtype)


def op_named(op: str) -> str:
    """The op that a name of it stands for; UsageError where it is no string."""
    if op.__class__ is not str:
        raise UsageError(f"there is no reduction {op!r}; use one of {', '.join(OPS)}, as a string")
    return OTHER_NAMES.get(op, op)


@cache
def plan_reduction(op: str, dtype: torch.dtype) -> Reduction:
    """How to reduce `dtype` by `op` (one of `OPS`); UsageError where that has no meaning."""
    if op not in MEANINGFUL:
        raise UsageError(f"there is no reduction {op!r}; use one of {', '.join(OPS)}")
    if dtype not in DTYPES:
        raise UsageError(f"{dtype} cannot be reduced; use one of {_names(DTYPES)}")
    if dtype not in MEANINGFUL[op]:
        raise UsageError(f"{op} has no meaning for {dtype}; it takes {_names(MEANINGFUL[op])}")
    if dtype == torch.bool:
        return Reduction(op, dtype, torch.uint8, _BOOL_OP[op])
    wire_op = "sum" if op in ("avg", "premul_sum") else op
    return Reduction(op, dtype, _wire_dtype(op, dtype), wire_op)


def _wire_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    if dtype in HALF_DTYPES:
        return torch.float32
    if dtype in INTEGERS and op == "avg":
        return torch.int64
    if dtype in COMPLEXES and op != "product":
        return _REAL_OF[dtype]
    return dtype


def _fits(small: torch.Size, large: torch.Size) -> bool:
    """Whether a tensor of the one shape times one of the other is of the other."""
    try:
        return torch.broadcast_shapes(small, large) == large
    except RuntimeError:
        return False


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
