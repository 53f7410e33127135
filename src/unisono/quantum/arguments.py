"""What callers give, checked: each refusal has what was given and what was expected, before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.circuit.parameter import is_index

DTYPES = (torch.complex64, torch.complex128)


def shown(given: Any) -> str:
    """A short name of anything, for errors."""
    text = " ".join(repr(given).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(given).__name__})"


def require_comm(comm: Any) -> Communicator | None:
    if comm is not None and not isinstance(comm, Communicator):
        raise UsageError(f"comm={shown(comm)}: expected a communicator, such as uni.init() gives, or None")
    return comm


def require_dtype(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        given = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise UsageError(f"dtype {given}: expected torch.complex64 or torch.complex128")
    return dtype


def require_device(given: torch.device | str) -> torch.device:
    """The device, if it is here and states can be on it."""
    try:
        device = torch.device(given)
    except (TypeError, RuntimeError, ValueError):
        raise UsageError(f"device {given!r}: expected 'cpu', 'cuda' or 'cuda:1'") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {str(device)!r}: states are on 'cpu' or 'cuda'")
    found = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= found:
        raise UsageError(f"device {str(device)!r}: torch sees {found} CUDA GPUs here; use device='cpu'")
    return device


def require_path(path: Any, what: str) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(f"{what} {shown(path)}: expected the path of a folder")
    return Path(path)


def require_count(name: str, value: Any, least: int, most: int | None = None) -> int:
    if not is_index(value) or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise UsageError(f"{name}={value!r}: expected a whole number of at least {least}{upper}")
    return int(value)
