"""Distributed, differentiable state-vector simulation of quantum circuits.

    from unisono import quantum as uq

The names below load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.quantum.circuit import Circuit as Circuit
    from unisono.quantum.operation import Operation as Operation
    from unisono.quantum.parameter import Affine as Affine
    from unisono.quantum.parameter import feature as feature
    from unisono.quantum.parameter import weight as weight

_HOME = {
    "Affine": "parameter",
    "Circuit": "circuit",
    "Operation": "operation",
    "feature": "parameter",
    "weight": "parameter",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono.quantum' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unisono.quantum.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
