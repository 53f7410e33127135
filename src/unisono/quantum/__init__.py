"""Distributed, differentiable state-vector simulation of quantum circuits.

    from unisono import quantum as uq

The names below load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.quantum import templates as templates
    from unisono.quantum.circuit import Circuit as Circuit
    from unisono.quantum.observable import Hermitian as Hermitian
    from unisono.quantum.observable import I as I
    from unisono.quantum.observable import PauliSum as PauliSum
    from unisono.quantum.observable import Projector as Projector
    from unisono.quantum.observable import X as X
    from unisono.quantum.observable import Y as Y
    from unisono.quantum.observable import Z as Z
    from unisono.quantum.operation import Operation as Operation
    from unisono.quantum.parameter import Affine as Affine
    from unisono.quantum.parameter import feature as feature
    from unisono.quantum.parameter import weight as weight
    from unisono.quantum.qasm import QasmError as QasmError
    from unisono.quantum.qasm import from_qasm as from_qasm
    from unisono.quantum.qasm import load_qasm as load_qasm

_HOME = {
    "Affine": "parameter",
    "Circuit": "circuit",
    "Hermitian": "observable",
    "I": "observable",
    "Operation": "operation",
    "PauliSum": "observable",
    "Projector": "observable",
    "QasmError": "qasm",
    "X": "observable",
    "Y": "observable",
    "Z": "observable",
    "feature": "parameter",
    "from_qasm": "qasm",
    "load_qasm": "qasm",
    "weight": "parameter",
}

__all__ = sorted([*_HOME, "templates"])


def __getattr__(name: str) -> Any:
    if name == "templates":
        return importlib.import_module("unisono.quantum.templates")
    if name not in _HOME:
        raise AttributeError(f"module 'unisono.quantum' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unisono.quantum.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
