"""Expectation values of circuits with noise from quantum trajectories: state vectors that draw Kraus operators.

A trajectory takes 2^n amplitudes where a density matrix takes 4^n. The mean over trajectories has a statistical error
that falls with the square root of their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.quantum.arguments import require_count
from unisono.quantum.circuit.circuit import Circuit, require_circuit
from unisono.quantum.circuit.parameter import require_seed
from unisono.quantum.observables.expectation import Observed
from unisono.quantum.observables.observable import observables as parsed
from unisono.quantum.shots import ShotGroup, walk
from unisono.quantum.state import State


@dataclass(frozen=True)
class Trajectories:
    """`values[t, o]` is the expectation value of observable o on trajectory t, float64."""

    values: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        return self.values.mean(0)

    @property
    def error(self) -> torch.Tensor:
        """The standard error of each mean."""
        return self.values.std(0) / len(self.values) ** 0.5

    def __repr__(self) -> str:
        pairs = zip(self.mean.tolist(), self.error.tolist(), strict=True)
        return f"Trajectories({len(self.values)}: {', '.join(f'{mean:.6g} +- {error:.2g}' for mean, error in pairs)})"


def trajectories(
    circuit: Circuit,
    count: int,
    observables: Any,
    *,
    weights: Any = (),
    features: Any = (),
    comm: Communicator | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.complex128,
    ranks_per_state: int = 1,
    **options: Any,
) -> Trajectories:
    """Expectation values of observables on quantum trajectories, on every rank.

    Trajectory t draws the same outcomes whatever the number of ranks. Trajectories that have drawn alike so far are
    simulated once.

    Args:
        circuit: The circuit.
        count: How many trajectories.
        observables: One or several.
        weights: Values of its weights.
        features: Values of its features.
        comm: The ranks.
        seed: Of the outcomes.
        dtype: Of amplitudes.
        ranks_per_state: Ranks that share one state; groups of them take their part of the trajectories (default: each
            rank has states of its own).
        **options: Those of State.
    """
    given = require_circuit(circuit, "trajectories").check_values(weights, features)
    circuit = circuit.with_strengths(*given)
    given = given[0][: circuit.weights], given[1][: circuit.features]
    count, seed = require_count("count", count, 2, 1 << 31), require_seed(seed)
    observed = Observed(parsed(observables), circuit.wires)
    group = ShotGroup.of(comm, count, ranks_per_state if comm is not None else None)
    values = torch.zeros((count, len(observed.sums)), dtype=torch.float64)

    def arrive(state: State, numbers: np.ndarray, _: list[np.random.Generator]) -> None:
        values[torch.from_numpy(numbers)] = observed.values(state, restore=False)

    walk(circuit, group.state(circuit.wires, dtype, options), group.numbers, given, seed, arrive)
    return Trajectories(group.joined(values))
