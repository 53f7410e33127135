"""What a reduction must give, computed in one process from everybody's tensors, without unisono."""

from __future__ import annotations

from functools import reduce

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOATS = (*HALF_DTYPES, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEXES = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEXES)
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
FACTOR = 0.5  # a power of two, so that the order of multiplying and rounding cannot matter


def has_meaning(op: str, dtype: torch.dtype) -> bool:
    if op in ("band", "bor", "bxor"):
        return dtype in INTEGERS or dtype == torch.bool
    if op in ("min", "max"):
        return dtype not in COMPLEXES
    if op == "avg":
        return dtype != torch.bool
    if op == "premul_sum":
        return dtype in FLOATS or dtype in COMPLEXES
    return True


def sample(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that differs between ranks; small, so that every dtype holds its sums and products exactly."""
    generator = torch.Generator().manual_seed(1000 + rank)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    high = 2 if dtype == torch.bool else 4
    real = torch.randint(low, high, shape, generator=generator)
    if dtype in COMPLEXES:
        return torch.complex(real.double(), torch.randint(-3, 4, shape, generator=generator).double()).to(dtype)
    return real.to(dtype)


def reduced(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        return reduce(_bool_pair(op), tensors)
    if op in ("band", "bor", "bxor"):
        pair = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
        return reduce(pair, tensors)
    wide = [_widened(tensor) for tensor in tensors]
    if op == "min":
        return reduce(torch.minimum, wide).to(dtype)
    if op == "max":
        return reduce(torch.maximum, wide).to(dtype)
    if op == "product":
        return reduce(torch.mul, wide).to(dtype)
    total = reduce(torch.add, [w * FACTOR for w in wide] if op == "premul_sum" else wide)
    if op == "avg":
        mode = "trunc" if dtype in INTEGERS else None
        total = torch.div(total, len(tensors), rounding_mode=mode)
    return total.to(dtype)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _bool_pair(op: str):  # type: ignore[no-untyped-def]
    if op in ("sum", "max", "bor"):
        return torch.logical_or
    if op in ("product", "min", "band"):
        return torch.logical_and
    return torch.logical_xor
