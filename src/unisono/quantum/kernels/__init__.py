"""What applies operations to a rank's amplitudes: the readable kernel in torch, and the fast ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.quantum.kernels import reference
from unisono.quantum.operation import Operation

Runner = Callable[[torch.Tensor, Any, Any], None]  # (local amplitudes, weights, features): in place
KERNELS = ("auto", "cpu", "reference")


def runner(operations: Sequence[Operation], axes: int, dtype: torch.dtype, device: torch.device, kernel: str) -> Runner:
    """Operations on the axes of 2^axes amplitudes, made ready to be run many times.

    "auto" is the fastest kernel there is for the device: "cpu" (numba) where it is installed, else "reference"."""
    if kernel == "auto":
        fast = device.type == "cpu" and axes > 0 and importlib.util.find_spec("numba") is not None
        kernel = "cpu" if fast else "reference"
    if kernel == "cpu":
        from unisono.quantum.compiled import Compiled  # numba is optional

        return Compiled(operations, axes, dtype).run
    return lambda local, weights, features: reference.run(local, operations, weights, features)


def require_kernel(kernel: str) -> str:
    if kernel not in KERNELS:
        raise UsageError(f"kernel {kernel!r}: expected one of {', '.join(KERNELS)}")
    return kernel
