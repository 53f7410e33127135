"""Distributed, differentiable state-vector simulation of quantum circuits.

    from unisono import quantum as uq

The names below load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.quantum.circuit import Circuit as Circuit
    from unisono.quantum.expectation import expectations as expectations
    from unisono.quantum.layer import Layer as Layer
    from unisono.quantum.observable import Hermitian as Hermitian
    from unisono.quantum.observable import I as I
    from unisono.quantum.observable import PauliSum as PauliSum
    from unisono.quantum.observable import Projector as Projector
    from unisono.quantum.observable import X as X
    from unisono.quantum.observable import Y as Y
    from unisono.quantum.observable import Z as Z
    from unisono.quantum.operation import Operation as Operation
    from unisono.quantum.outputs import amplitudes as amplitudes
    from unisono.quantum.outputs import counts as counts
    from unisono.quantum.outputs import density as density
    from unisono.quantum.outputs import fidelity as fidelity
    from unisono.quantum.outputs import overlap as overlap
    from unisono.quantum.outputs import probabilities as probabilities
    from unisono.quantum.outputs import samples as samples
    from unisono.quantum.outputs import shard as shard
    from unisono.quantum.outputs import simulate as simulate
    from unisono.quantum.outputs import variances as variances
    from unisono.quantum.parameter import Affine as Affine
    from unisono.quantum.parameter import feature as feature
    from unisono.quantum.parameter import weight as weight
    from unisono.quantum.qasm import QasmError as QasmError
    from unisono.quantum.qasm import from_qasm as from_qasm
    from unisono.quantum.qasm import load_qasm as load_qasm
    from unisono.quantum.schedule import Schedule as Schedule
    from unisono.quantum.sharing import share as share
    from unisono.quantum.shots import measured as measured
    from unisono.quantum.state import State as State
    from unisono.quantum.storage import load as load
    from unisono.quantum.storage import save as save
    from unisono.quantum.templates import hardware_efficient as hardware_efficient
    from unisono.quantum.templates import maxcut as maxcut
    from unisono.quantum.templates import qaoa as qaoa
    from unisono.quantum.templates import strongly_entangling as strongly_entangling
    from unisono.quantum.templates import uccsd as uccsd

_HOME = {
    "Affine": "parameter",
    "Circuit": "circuit",
    "Hermitian": "observable",
    "I": "observable",
    "Layer": "layer",
    "Operation": "operation",
    "PauliSum": "observable",
    "Projector": "observable",
    "QasmError": "qasm",
    "Schedule": "schedule",
    "State": "state",
    "X": "observable",
    "Y": "observable",
    "Z": "observable",
    "amplitudes": "outputs",
    "counts": "outputs",
    "density": "outputs",
    "expectations": "expectation",
    "feature": "parameter",
    "fidelity": "outputs",
    "from_qasm": "qasm",
    "hardware_efficient": "templates",
    "load": "storage",
    "load_qasm": "qasm",
    "maxcut": "templates",
    "measured": "shots",
    "overlap": "outputs",
    "probabilities": "outputs",
    "qaoa": "templates",
    "samples": "outputs",
    "save": "storage",
    "shard": "outputs",
    "share": "sharing",
    "simulate": "outputs",
    "strongly_entangling": "templates",
    "uccsd": "templates",
    "variances": "outputs",
    "weight": "parameter",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono.quantum' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unisono.quantum.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
