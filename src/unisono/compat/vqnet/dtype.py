"""VQNet's dtypes: torch's own, which may also be given by VQNet's numbers (dtype=8 is complex64)."""

from __future__ import annotations

import torch

from unisono.compat.language import say
from unisono.compat.vqnet.vqnet_names import missing_names
from unisono.errors import UsageError

kbool = torch.bool
kuint8 = torch.uint8
kint8 = torch.int8
kint16 = torch.int16
kint32 = torch.int32
kint64 = torch.int64
kfloat32 = torch.float32
kfloat64 = torch.float64
kcomplex64 = torch.complex64
kcomplex128 = torch.complex128

BY_NUMBER = (kbool, kuint8, kint8, kint16, kint32, kint64, kfloat32, kfloat64, kcomplex64, kcomplex128)

Dtype = int | torch.dtype


def dtype_of(given: Dtype) -> torch.dtype:
    """The dtype of that number, or itself."""
    if isinstance(given, torch.dtype):
        return given
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < len(BY_NUMBER):
        numbers = ", ".join(f"{number} ({str(each).removeprefix('torch.')})" for number, each in enumerate(BY_NUMBER))
        raise UsageError(
            say(
                f"dtype={given!r}: expected a torch dtype or one of {numbers}",
                f"dtype={given!r}：应为 torch 的 dtype，或 {numbers} 之一",
            )
        )
    return BY_NUMBER[given]


__getattr__ = missing_names(__name__)
