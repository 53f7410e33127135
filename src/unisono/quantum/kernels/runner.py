"""The choice of a kernel: operations made ready to be applied to a rank's amplitudes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from unisono.errors import UsageError
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.kernels import reference


class Runner(Protocol):
    """Operations on a rank's amplitudes, ready to be run in place, and to be undone on a state and a co-state at once,
    which gives the gradients of weights and of features."""

    def __call__(self, local: torch.Tensor, weights: Any = (), features: Any = ()) -> None: ...

    def reverse(
        self, local: torch.Tensor, costate: torch.Tensor, weights: Any = (), features: Any = ()
    ) -> tuple[np.ndarray, np.ndarray]: ...


KERNELS = ("auto", "cpu", "gpu", "reference")


def runner(operations: Sequence[Operation], axes: int, dtype: torch.dtype, device: torch.device, kernel: str) -> Runner:
    """Operations on the axes of 2^axes amplitudes, made ready to be run many times.

    "auto" is the fastest kernel there is for the device: "gpu" on one, else "cpu" (numba) where it is installed, else
    "reference"."""
    if kernel == "auto":
        kernel = _fastest(operations, axes, device)
    if kernel == "gpu":
        from unisono.quantum.kernels.gpu import GpuCompiled  # compiled where there is a GPU

        return GpuCompiled(operations, axes, dtype, device)
    if kernel == "cpu":
        from unisono.quantum.compile.compiled import Compiled  # numba is optional

        return Compiled(operations, axes, dtype)
    return reference.ReferenceRunner(operations)


def _fastest(operations: Sequence[Operation], axes: int, device: torch.device) -> str:
    if axes == 0:
        return "reference"
    if device.type == "cuda":
        from unisono.quantum.kernels.gpu import fits

        return "gpu" if torch.version.hip is None and fits(operations) else "reference"
    return "cpu" if device.type == "cpu" and importlib.util.find_spec("numba") is not None else "reference"


def require_kernel(kernel: str) -> str:
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise UsageError(f"kernel {kernel!r}: expected one of {', '.join(KERNELS)}")
    return kernel
