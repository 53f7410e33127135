"""Derivatives of expectation values by the adjoint method.

One walk backwards gives the gradient of any weighted sum of a tape's observables: a vector-Jacobian product. A Jacobian
takes a walk for each observable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unisono.errors import UsageError
from unisono.integrations.pennylane.measurement import observable_of
from unisono.integrations.pennylane.simulator import Job, Simulator
from unisono.quantum.gradients.adjoint import gradients
from unisono.quantum.gradients.layer_outputs import Expectations


def vjp(simulator: Simulator, job: Job, tape: Any, cotangents: Any) -> tuple[Any, ...]:
    """The gradient of sum_i cotangents[i] <O_i> for each trainable parameter; cotangents may be batched, (i, batch)."""
    count = len(tape.measurements)
    given = [cotangents] if count == 1 else list(cotangents)
    shape = next((np.shape(each) for each in given if np.shape(each)), ())
    weights = np.stack([np.broadcast_to(np.asarray(each, dtype=np.float64), shape) for each in given])
    outputs = expectations_of(simulator, job, tape)
    columns = _walks(simulator, job, tape, outputs, weights.reshape(count, -1).T)
    return tuple(np.stack(columns, axis=-1)) if shape else tuple(columns[0])


def jacobian(simulator: Simulator, job: Job, tape: Any) -> Any:
    """d<O_i>/d(trainable parameter j), nested in tuples as PennyLane wants them."""
    outputs = expectations_of(simulator, job, tape)
    rows = _walks(simulator, job, tape, outputs, np.eye(len(tape.measurements)))
    nested = [tuple(np.array(each) for each in row) if len(row) != 1 else np.array(row[0]) for row in rows]
    return nested[0] if len(nested) == 1 else tuple(nested)


def expectations_of(simulator: Simulator, job: Job, tape: Any) -> Expectations:
    wire_of = job.wire_of
    found = [observable_of(mp.obs, wire_of) for mp in tape.measurements]
    for mp, each in zip(tape.measurements, found, strict=True):
        if each is None:
            raise UsageError(
                f"the adjoint method of {mp.obs}: expected sums of Pauli strings, Hermitian matrices of few wires and "
                "projectors; use diff_method='parameter-shift'"
            )
    return Expectations([each for each in found if each is not None], job.wires, simulator.dtype)


def _walks(simulator: Simulator, job: Job, tape: Any, outputs: Expectations, weights: np.ndarray) -> list[np.ndarray]:
    """The gradient of the weighted sum of expectation values for each row of weights."""
    found = [np.zeros(len(tape.trainable_params)) for _ in weights]
    rows = [number for number, row in enumerate(weights) if row.any()]
    for number in rows:
        state = simulator.take(job, again=number != rows[-1])
        costate = outputs.costate(state, torch.empty(0), torch.from_numpy(weights[number].copy()))
        total = torch.from_numpy(gradients(job.shared.program, state, costate, job.angles)[0])
        if job.shared.comm is not None:
            job.shared.comm.all_reduce(total)
        found[number] = np.array([_derivative(job, tape, each, total.numpy()) for each in tape.trainable_params])
    return found


def _derivative(job: Job, tape: Any, parameter: int, found: np.ndarray) -> float:
    known = job.shared.weight_of
    if parameter >= len(known):
        return 0.0  # of an observable: PennyLane has warned that the adjoint method leaves these out
    if (weight := known[parameter]) is None:
        raise UsageError(
            f"the adjoint method with respect to {tape.par_info[parameter]['op'].name}: expected angles of gates; use "
            "diff_method='parameter-shift', or a parameter with requires_grad=False"
        )
    return float(found[weight])
