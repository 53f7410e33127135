"""Measurement processes on a state.

Expectation values and variances of sums of Pauli strings, small matrices and projectors, probabilities, samples and
reduced density matrices are read off the sharded state. What else PennyLane defines as a function of all amplitudes is
computed from them, gathered on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import matmul
from typing import Any

import numpy as np
import pennylane as qml
from pennylane.exceptions import DeviceError
from pennylane.measurements import (
    ClassicalShadowMP,
    ExpectationMP,
    ProbabilityMP,
    ShadowExpvalMP,
    StateMP,
    VarianceMP,
)
from pennylane.tape.tape import rotations_and_diagonal_measurements

from unisono.errors import UsageError
from unisono.integrations.pennylane.simulator import Job, Simulator
from unisono.quantum.observables.expectation import expectations
from unisono.quantum.observables.observable import LARGEST_EXPANSION, Hermitian, PauliSum, Projector
from unisono.quantum.outputs import MOST_DENSITY, density, probabilities, samples, variances
from unisono.quantum.state import State

SHADOWS = (ClassicalShadowMP, ShadowExpvalMP)


def observable_of(obs: Any, wire_of: Mapping[Any, int]) -> PauliSum | None:
    """The observable as unisono's; None where it is none: a large matrix, or a product of some."""
    if obs.pauli_rep is not None:
        return _pauli_sum(obs.pauli_rep, wire_of)
    wires = [wire_of[label] for label in obs.wires]
    if isinstance(obs, qml.ops.Sum | qml.ops.SProd):
        total = PauliSum()
        for coefficient, term in zip(*obs.terms(), strict=True):
            if (found := observable_of(term, wire_of)) is None:
                return None
            total += float(np.real(coefficient)) * found
        return total
    if isinstance(obs, qml.Projector) and len(obs.data[0]) == len(wires):
        return Projector([int(bit) for bit in qml.math.toarray(obs.data[0])], wires)
    if isinstance(obs, qml.ops.Prod) and not obs.has_overlapping_wires:
        factors = [observable_of(factor, wire_of) for factor in obs.operands]
        narrow = all(len(factor.wires) <= LARGEST_EXPANSION for factor in obs.operands)
        return reduce(matmul, factors) if narrow and None not in factors else None
    if len(wires) > LARGEST_EXPANSION or not (obs.has_matrix or obs.has_sparse_matrix):
        return None
    matrix = obs.matrix() if obs.has_matrix else obs.sparse_matrix().toarray()
    return Hermitian(qml.math.toarray(matrix), wires)


def _pauli_sum(rep: Any, wire_of: Mapping[Any, int]) -> PauliSum:
    terms = []
    for word, given in rep.items():
        coefficient = complex(given)
        if abs(coefficient.imag) > 1e-12 * max(1.0, abs(coefficient.real)):
            raise UsageError(
                f"observable with the coefficient {coefficient:g}: expected real ones, so that it is Hermitian"
            )
        if coefficient.real:
            terms.append((coefficient.real, tuple(sorted((wire_of[label], pauli) for label, pauli in word.items()))))
    return PauliSum(tuple(terms))


# ---- analytic -------------------------------------------------------------------------------------------------------


def analytic(simulator: Simulator, job: Job, measured: Sequence[Any], state: State) -> list[Any]:
    """The result of each measurement process; expectation values are read together."""
    wire_of = job.wire_of
    found: dict[int, Any] = {}
    for kind, read in ((ExpectationMP, expectations), (VarianceMP, variances)):
        numbers = [number for number, mp in enumerate(measured) if type(mp) is kind and mp.obs is not None]
        made = {number: observable_of(measured[number].obs, wire_of) for number in numbers}
        known = {number: each for number, each in made.items() if each is not None}
        if known:
            values = read(state, list(known.values())).numpy()
            found |= dict(zip(known, values, strict=True))
    for number, mp in enumerate(measured):
        if number not in found:
            found[number] = _read(simulator, job, mp, state)
    return [np.asarray(found[number]) for number in range(len(measured))]


def _read(simulator: Simulator, job: Job, mp: Any, state: State) -> Any:
    wires = [job.wire_of[label] for label in mp.wires]
    if isinstance(mp, ExpectationMP) and isinstance(mp.obs, qml.SparseHamiltonian):
        psi = _amplitudes(state)
        return np.vdot(psi, mp.obs.sparse_matrix(wire_order=job.labels) @ psi).real
    if _is_of_a_part(mp) and 0 < len(wires) <= MOST_DENSITY:
        numbered = mp.map_wires({label: number for number, label in enumerate(mp.wires)})
        return numbered.process_density_matrix(density(state, wires).numpy(), numbered.wires)
    rotated = simulator.rotated(state, mp.diagonalizing_gates(), job.labels)
    if isinstance(mp, ProbabilityMP):
        return probabilities(rotated, wires or None).numpy()
    return mp.map_wires(job.wire_of).process_state(_amplitudes(rotated), qml.wires.Wires(range(job.wires)))


def _is_of_a_part(mp: Any) -> bool:
    """Whether it is a function of the reduced density matrix of its wires: an entropy, a purity, the matrix itself."""
    return mp.obs is None and type(mp) not in (StateMP, ProbabilityMP) and hasattr(mp, "process_density_matrix")


def _amplitudes(state: State) -> np.ndarray:
    return state.amplitudes().cpu().numpy()


# ---- shots ----------------------------------------------------------------------------------------------------------


def sampled(simulator: Simulator, job: Job, tape: Any, state: State, rng: np.random.Generator) -> Any:
    """The results of a tape whose observables commute wire by wire, all from the same shots."""
    if any(isinstance(mp, SHADOWS) for mp in tape.measurements):
        return _shadows(job, tape, state, rng)
    rotations, measured = rotations_and_diagonal_measurements(tape)
    gates = [*rotations, *(gate for mp in measured for gate in mp.diagonalizing_gates())]
    rotated = simulator.rotated(state, gates, job.labels)
    seed = int(rng.integers(1 << 62))
    wires = sorted({job.wire_of[label] for mp in measured for label in mp.wires}) or [*range(job.wires)]
    bits = samples(rotated, tape.shots.total_shots, seed=seed, wires=wires).numpy().astype(np.int64)
    order = qml.wires.Wires([job.labels[wire] for wire in wires])
    results = []
    for lower, upper in tape.shots.bins():
        found = [mp.process_samples(bits[lower:upper], order) for mp in measured]
        results.append(found[0] if len(found) == 1 else tuple(found))
    return tuple(results) if tape.shots.has_partitioned_shots else results[0]


def _shadows(job: Job, tape: Any, state: State, rng: np.random.Generator) -> Any:
    if len(tape.measurements) > 1:
        raise DeviceError("a classical shadow beside other measurements: measure it in a QNode of its own")
    (mp,) = tape.measurements
    psi, order = _amplitudes(state).reshape((2,) * job.wires), qml.wires.Wires(job.labels)
    results = [mp.process_state_with_shots(psi, order, shots, rng=rng) for shots in tape.shots]
    return tuple(results) if tape.shots.has_partitioned_shots else results[0]
