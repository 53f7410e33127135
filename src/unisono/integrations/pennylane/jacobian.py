"""Derivatives of expectation values by the adjoint method.

One walk backwards gives the gradient of any weighted sum of a tape's observables: a vector-Jacobian product. A Jacobian
takes a walk for each observable. A tape with a batch takes as many for each sample: its result depends on its own
angles, and on those that all samples share, whose gradient is the sum over samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unisono.errors import UsageError
from unisono.integrations.pennylane.measurement import observable_of
from unisono.integrations.pennylane.simulator import Job, JobBatch, Simulator
from unisono.quantum.gradients.adjoint import gradients
from unisono.quantum.gradients.layer_outputs import Expectations

Entries = list[list[np.ndarray]]  # d<O_i>/d(trainable parameter j): the result's dimensions, then the parameter's


class Products(tuple[Any, ...]):
    """Vector-Jacobian products of different shapes: an entry for each sample, and sums over samples.

    PennyLane's torch interface reads `np.squeeze(products).shape`, and numpy makes no array of different shapes."""

    def squeeze(self) -> np.ndarray:
        return np.empty(len(self), dtype=object)


def vjp(simulator: Simulator, jobs: JobBatch, tape: Any, cotangents: Any) -> tuple[Any, ...]:
    """The gradient of sum_i cotangents[i] <O_i> for each trainable parameter. Cotangents of a tape with a batch are
    (i, samples); others may be batched, (i, batch)."""
    count = len(tape.measurements)
    given = [cotangents] if count == 1 else list(cotangents)
    shape = next((np.shape(each) for each in given if np.shape(each)), ())
    if jobs.size is not None and shape != (jobs.size,):
        raise UsageError(
            f"cotangents of shape {shape} for a batch of {jobs.size} samples: expected ({jobs.size},) for each "
            "expectation value"
        )
    weights = np.stack([np.broadcast_to(np.asarray(each, dtype=np.float64), shape) for each in given])
    columns = weights.reshape(count, -1).T
    if jobs.size is None:
        found = _gradients(simulator, jobs, tape, columns[None])[0]
        return tuple(found.T) if shape else tuple(found[0])
    rows = _gradients(simulator, jobs, tape, columns[:, None])[:, 0].T
    pairs = zip(tape.trainable_params, rows, strict=True)
    return Products(row if jobs.is_batched(parameter) else row.sum() for parameter, row in pairs)


def jacobian(simulator: Simulator, jobs: JobBatch, tape: Any) -> Any:
    """d<O_i>/d(trainable parameter j), nested in tuples as PennyLane wants them."""
    nested = [tuple(row) if len(row) != 1 else row[0] for row in _entries(simulator, jobs, tape)]
    return nested[0] if len(nested) == 1 else tuple(nested)


def jvp(simulator: Simulator, jobs: JobBatch, tape: Any, tangents: Any) -> Any:
    """sum_j d<O_i>/d(trainable parameter j) tangents[j]."""
    rows = _entries(simulator, jobs, tape)
    if jobs.size is None:
        found = [np.asarray(np.dot(row, tangents)) for row in rows]
    else:
        found = [np.zeros(jobs.size) for _ in rows]
        for total, row in zip(found, rows, strict=True):
            for entry, tangent in zip(row, tangents, strict=True):
                total += np.tensordot(entry, tangent, np.ndim(tangent))
    return tuple(found) if len(found) > 1 else found[0]


def _entries(simulator: Simulator, jobs: JobBatch, tape: Any) -> Entries:
    count = len(tape.measurements)
    weights = np.broadcast_to(np.eye(count), (len(jobs.samples), count, count))
    found = _gradients(simulator, jobs, tape, weights)
    if jobs.size is None:
        return [[np.array(each) for each in row] for row in found[0]]
    made: Entries = []
    for columns in found.transpose(1, 2, 0):
        pairs = zip(tape.trainable_params, columns, strict=True)
        made.append([np.diag(each) if jobs.is_batched(parameter) else each.copy() for parameter, each in pairs])
    return made


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


def _gradients(simulator: Simulator, jobs: JobBatch, tape: Any, weights: np.ndarray) -> np.ndarray:
    """(samples, rows, trainable parameters): the gradient of a weighted sum of a sample's expectation values for each
    of its rows of weights, (samples, rows, observables)."""
    shared = jobs.samples[0].shared
    outputs = expectations_of(simulator, jobs.samples[0], tape)
    found = torch.zeros(*weights.shape[:2], len(jobs.samples[0].angles), dtype=torch.float64)
    for sample, job in enumerate(jobs.samples):
        rows = [number for number, row in enumerate(weights[sample]) if row.any()]
        for number in rows:
            state = simulator.take(job, again=number != rows[-1])
            costate = outputs.costate(state, torch.empty(0), torch.from_numpy(weights[sample, number].copy()))
            found[sample, number] = torch.from_numpy(gradients(shared.program, state, costate, job.angles)[0])
    if shared.comm is not None and found.numel():
        shared.comm.all_reduce(found)
    chosen = np.zeros((*weights.shape[:2], len(tape.trainable_params)))
    for column, parameter in enumerate(tape.trainable_params):
        if (weight := _weight(jobs, tape, parameter)) is not None:
            chosen[..., column] = found[..., weight].numpy()
    return chosen


def _weight(jobs: JobBatch, tape: Any, parameter: int) -> int | None:
    """Which of the program's weights a parameter of the tape is."""
    known = jobs.samples[0].shared.weight_of
    if parameter >= len(known):
        return None  # of an observable: PennyLane has warned that the adjoint method leaves these out
    if (weight := known[parameter]) is None:
        raise UsageError(
            f"the adjoint method with respect to {tape.par_info[parameter]['op'].name}: expected angles of gates; use "
            "diff_method='parameter-shift', or a parameter with requires_grad=False"
        )
    return weight
