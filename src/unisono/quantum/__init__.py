"""Distributed, differentiable simulation of quantum circuits: state vectors, and density matrices.

    from unisono import quantum as uq

The names below load what they need on first use. In this folder is what users call:

    state        a state vector sharded over ranks        outputs     probabilities, samples, variances, ...
    layer        a circuit as a torch module              shots       measured classical bits
    functional   circuits as differentiable functions     command     `unisono qsim`, which runs a job
    storage      states on disk
    arguments    checks of what callers pass              qiskit_circuits, cirq_circuits   of other libraries

and below it, from the ground up: circuit/ (gates, channels and circuits), observables/, schedule/ (when ranks exchange
qubits), compile/ and kernels/ (operations on one rank's amplitudes), distributed/ (what each rank runs), gradients/,
noise/ (density matrices and trajectories), qasm/.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.quantum.circuit.channels import Channel as Channel
    from unisono.quantum.circuit.channels import amplitude_damping as amplitude_damping
    from unisono.quantum.circuit.channels import bit_flip as bit_flip
    from unisono.quantum.circuit.channels import depolarizing as depolarizing
    from unisono.quantum.circuit.channels import kraus as kraus
    from unisono.quantum.circuit.channels import pauli_channel as pauli_channel
    from unisono.quantum.circuit.channels import phase_damping as phase_damping
    from unisono.quantum.circuit.channels import phase_flip as phase_flip
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
    from unisono.quantum.cirq_circuits import from_cirq as from_cirq
    from unisono.quantum.distributed.rank_groups import share as share
    from unisono.quantum.functional import amplitude_embedding as amplitude_embedding
    from unisono.quantum.functional import evaluate as evaluate
    from unisono.quantum.layer import Layer as Layer
    from unisono.quantum.noise.density import DensityState as DensityState
    from unisono.quantum.noise.model import with_noise as with_noise
    from unisono.quantum.noise.trajectories import Trajectories as Trajectories
    from unisono.quantum.noise.trajectories import trajectories as trajectories
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
    from unisono.quantum.qiskit_circuits import from_qiskit as from_qiskit
    from unisono.quantum.schedule.schedule import Schedule as Schedule
    from unisono.quantum.shots import measured as measured
    from unisono.quantum.state import State as State
    from unisono.quantum.storage import load as load
    from unisono.quantum.storage import save as save

_HOME = {
    "Affine": "circuit.parameter",
    "Channel": "circuit.channels",
    "Circuit": "circuit.circuit",
    "DensityState": "noise.density",
    "Hermitian": "observables.observable",
    "I": "observables.observable",
    "Layer": "layer",
    "Operation": "circuit.operation",
    "PauliSum": "observables.observable",
    "Projector": "observables.observable",
    "QasmError": "qasm",
    "Schedule": "schedule.schedule",
    "State": "state",
    "Trajectories": "noise.trajectories",
    "X": "observables.observable",
    "Y": "observables.observable",
    "Z": "observables.observable",
    "amplitude_damping": "circuit.channels",
    "amplitude_embedding": "functional",
    "amplitudes": "outputs",
    "bit_flip": "circuit.channels",
    "counts": "outputs",
    "density": "outputs",
    "depolarizing": "circuit.channels",
    "evaluate": "functional",
    "expectations": "observables.expectation",
    "feature": "circuit.parameter",
    "fidelity": "outputs",
    "from_cirq": "cirq_circuits",
    "from_qasm": "qasm",
    "from_qiskit": "qiskit_circuits",
    "hardware_efficient": "circuit.templates",
    "kraus": "circuit.channels",
    "load": "storage",
    "load_qasm": "qasm",
    "maxcut": "circuit.templates",
    "measured": "shots",
    "overlap": "outputs",
    "pauli_channel": "circuit.channels",
    "phase_damping": "circuit.channels",
    "phase_flip": "circuit.channels",
    "probabilities": "outputs",
    "qaoa": "circuit.templates",
    "samples": "outputs",
    "save": "storage",
    "shard": "outputs",
    "share": "distributed.rank_groups",
    "simulate": "outputs",
    "strongly_entangling": "circuit.templates",
    "trajectories": "noise.trajectories",
    "uccsd": "circuit.templates",
    "variances": "outputs",
    "weight": "circuit.parameter",
    "with_noise": "noise.model",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono.quantum' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unisono.quantum.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
