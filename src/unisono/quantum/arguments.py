"""What callers give, checked: each refusal says what was given and what was expected, before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.parameter import is_index

if TYPE_CHECKING:
    from unisono.quantum.circuit import Circuit
    from unisono.quantum.state import State

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


def require_circuit(circuit: Any, what: str) -> Circuit:
    from unisono.quantum.circuit import Circuit  # what circuits are made of is checked here too

    if not isinstance(circuit, Circuit):
        raise UsageError(f"{what} of {shown(circuit)}: expected a uq.Circuit")
    return circuit


def require_state(state: Any, what: str) -> State:
    from unisono.quantum.state import State  # it imports this module

    if not isinstance(state, State):
        raise UsageError(f"{what} of {shown(state)}: expected a uq.State, such as uq.simulate(circuit) makes")
    return state


def require_path(path: Any, what: str) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(f"{what} {shown(path)}: expected the path of a folder")
    return Path(path)


def require_count(name: str, value: Any, least: int, most: int | None = None) -> int:
    if not is_index(value) or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise UsageError(f"{name}={value!r}: expected a whole number of at least {least}{upper}")
    return int(value)
