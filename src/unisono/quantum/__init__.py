"""Distributed, differentiable state-vector simulation of quantum circuits.

    from unisono import quantum as uq

The names below load what they need on first use. In this folder is what users call:

    state        a state vector sharded over ranks        outputs     probabilities, samples, variances, ...
    layer        a circuit as a torch module              shots       measured classical bits
    storage      states on disk                           command     `unisono qsim`, which runs a job
    arguments    checks of what callers pass

and below it, from the ground up: circuit/ (gates and circuits), observables/, schedule/ (when ranks exchange qubits),
compile/ and kernels/ (operations on one rank's amplitudes), distributed/ (what each rank runs), gradients/, qasm/.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.quantum.circuit.circuit import Circuit as Circuit
    from unisono.quantum.circuit.operation import Operation as Operation
    from unisono.quantum.circuit.parameter import Affine as Affine
    from unisono.quantum.circuit.parameter import feature as feature
    from unisono.quantum.circuit.parameter import weight as weight
    from unisono.quantum.circuit.templates import hardware_efficient as hardware_efficient
    from unisono.quantum.circuit.templates import maxcut as maxcut
    from unisono.quantum.circuit.templates import qaoa as qaoa
    from unisono.quantum.circuit.templates import strongly_entangling as strongly_entangling
    from unisono.quantum.circuit.templates import uccsd as uccsd
    from unisono.quantum.distributed.rank_groups import share as share
    from unisono.quantum.layer import Layer as Layer
    from unisono.quantum.observables.expectation import expectations as expectations
    from unisono.quantum.observables.observable import Hermitian as Hermitian
    from unisono.quantum.observables.observable import I as I
    from unisono.quantum.observables.observable import PauliSum as PauliSum
    from unisono.quantum.observables.observable import Projector as Projector
    from unisono.quantum.observables.observable import X as X
    from unisono.quantum.observables.observable import Y as Y
    from unisono.quantum.observables.observable import Z as Z
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
    from unisono.quantum.qasm import QasmError as QasmError
    from unisono.quantum.qasm import from_qasm as from_qasm
    from unisono.quantum.qasm import load_qasm as load_qasm
    from unisono.quantum.schedule.schedule import Schedule as Schedule
    from unisono.quantum.shots import measured as measured
    from unisono.quantum.state import State as State
    from unisono.quantum.storage import load as load
    from unisono.quantum.storage import save as save

_HOME = {
    "Affine": "circuit.parameter",
    "Circuit": "circuit.circuit",
    "Hermitian": "observables.observable",
    "I": "observables.observable",
    "Layer": "layer",
    "Operation": "circuit.operation",
    "PauliSum": "observables.observable",
    "Projector": "observables.observable",
    "QasmError": "qasm",
    "Schedule": "schedule.schedule",
    "State": "state",
    "X": "observables.observable",
    "Y": "observables.observable",
    "Z": "observables.observable",
    "amplitudes": "outputs",
    "counts": "outputs",
    "density": "outputs",
    "expectations": "observables.expectation",
    "feature": "circuit.parameter",
    "fidelity": "outputs",
    "from_qasm": "qasm",
    "hardware_efficient": "circuit.templates",
    "load": "storage",
    "load_qasm": "qasm",
    "maxcut": "circuit.templates",
    "measured": "shots",
    "overlap": "outputs",
    "probabilities": "outputs",
    "qaoa": "circuit.templates",
    "samples": "outputs",
    "save": "storage",
    "shard": "outputs",
    "share": "distributed.rank_groups",
    "simulate": "outputs",
    "strongly_entangling": "circuit.templates",
    "uccsd": "circuit.templates",
    "variances": "outputs",
    "weight": "circuit.parameter",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono.quantum' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unisono.quantum.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
