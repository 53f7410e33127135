"""Gradients by the adjoint method: the program walked backwards with a state and a co-state.

For E = <psi|O|psi>, or anything else with dE = 2 Re <lambda|d psi>, one walk gives the gradient of every angle: about
three times the work of running the circuit, whatever the number of parameters. Nothing is stored on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.errors import UsageError
from unisono.quantum.distributed.local_steps import LocalExchange, LocalOperations
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.state import State

Gradients = tuple[np.ndarray, np.ndarray]  # of the weights, of the features


def gradients(
    program: QuantumProgram, state: State, costate: State, weights: Any = (), features: Any = ()
) -> Gradients:
    """This rank's share of the gradients; their sum over the ranks of the state is the full gradient.

    `state` is what the program ended in. Both states are walked back to where the program began, and are spent."""
    if any(not isinstance(step, LocalOperations | LocalExchange) for step in program.steps):
        raise UsageError("a circuit with measurements, resets or conditions has no gradient")
    costate.norm_expected = costate.norm() if state.global_qubits else 1.0
    sizes = (np.size(weights), np.size(features))
    found = tuple(np.zeros(size) for size in sizes)
    for step in reversed(program.steps):
        if isinstance(step, LocalExchange):
            state.exchange(step)
            costate.exchange(step)
            continue
        assert isinstance(step, LocalOperations)
        runner = step.runner(state.wires - state.global_qubits, state.dtype, state.device, state.kernel)
        parts = runner.reverse(state.local, costate.local, weights, features)
        for total, part in zip(found, parts, strict=True):
            total += part
    return found[0], found[1]
