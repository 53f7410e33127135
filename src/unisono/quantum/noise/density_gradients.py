"""Exact outputs and gradients of circuits with noise: the adjoint method on a density matrix.

tr(O rho) = <vec(O)|vec(rho)>, so vec(O) is the co-state at the end. It is walked back through the doubled circuit:
gates are undone on both, as for pure states. A channel cannot be undone, so that the forward walk stores the
density matrix before each, and the co-state is multiplied by the channel's adjoint.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from unisono.errors import UsageError
from unisono.quantum.circuit.channels import Superoperator
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.distributed.local_steps import LocalExchange, LocalOperations, LocalStep
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.gradients.layer_outputs import Expectations, Probabilities
from unisono.quantum.kernels.reference import apply_matrix
from unisono.quantum.noise.density import DensityState
from unisono.quantum.observables.observable import PauliString
from unisono.quantum.state import State

MOST_WIRES = 12  # of a density matrix with gradients: each rank makes all of vec(O), 256 MiB at 12 in complex128


class MixedOutput:
    """The outputs of a layer of expectations or probabilities, read off a density matrix."""

    shiftable = True

    def __init__(self, output: Expectations | Probabilities) -> None:
        if output.wires > MOST_WIRES:
            raise UsageError(
                f"a layer of {output.wires} wires with channels: at most {MOST_WIRES} wires without shots; give shots="
            )
        self.pure, self.wires, self.width, self.dtype = output, output.wires, output.width, output.dtype

    def read(self, state: State) -> torch.Tensor:
        rho = DensityState.of_vector(state)
        if isinstance(self.pure, Probabilities):
            return rho.probabilities().to(self.dtype)
        return rho.expectations(self.pure.observables).to(self.dtype)

    def costate(self, state: State, output: torch.Tensor, gradient: torch.Tensor) -> State:
        """Half of vec(O), O being the sum of the outputs' operators weighted by the gradient."""
        size = 1 << self.wires
        matrix = torch.zeros((size, size), dtype=torch.complex128)
        if isinstance(self.pure, Probabilities):
            matrix.diagonal().copy_(gradient / 2)
        else:
            for weight, observable in zip(gradient.tolist(), self.pure.observables, strict=True):
                for coefficient, pauli_string in observable.paulis().terms:
                    _add(matrix, weight * coefficient / 2, pauli_string, self.wires)
        return state.blank().load_amplitudes(matrix.view(-1))


def channels_apart(program: QuantumProgram) -> QuantumProgram:
    """The program with channels in steps of their own, one for each whose strength is a parameter."""
    steps: list[LocalStep] = []
    for step in program.steps:
        if isinstance(step, LocalOperations):
            steps += [LocalOperations(tuple(run)) for _, run in groupby(step.operations, _kind_of_step)]
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


def mixed_gradients(
    program: QuantumProgram, state: State, output: MixedOutput, gradient: torch.Tensor, weights: Any, features: Any
) -> tuple[np.ndarray, np.ndarray]:
    """This rank's share of the gradients of Re <gradient, output>. `state` is that before the program."""
    before: dict[int, tuple[torch.Tensor, float]] = {}
    state.begin(program.schedule)
    for number, step in enumerate(program.steps):
        if _has_channels(step):
            state.require_another()
            before[number] = state.local.clone(), state.norm_expected
        state.do(step, weights, features)
    state.layout, state.index_map = program.schedule.finish, program.index_map.copy()
    costate = output.costate(state, torch.empty(0), gradient)
    found = np.zeros(np.size(weights)), np.zeros(np.size(features))
    for number, step in reversed([*enumerate(program.steps)]):
        if isinstance(step, LocalExchange):
            state.exchange(step)
            costate.exchange(step)
            continue
        assert isinstance(step, LocalOperations)
        if number in before:
            for each in reversed(step.operations):
                angles = each.angles(weights, features)
                if each.parameters:
                    _add_slope(found, each, angles, before[number][0], costate.local)
                apply_matrix(costate.local, each.targets, each.matrix(angles).conj().T)
            costate.norm_expected = costate.norm()
            state.local, state.norm_expected = before.pop(number)
            continue
        runner = step.runner(state.wires - state.global_qubits, state.dtype, state.device, state.kernel)
        parts = runner.reverse(state.local, costate.local, weights, features)
        for total, part in zip(found, parts, strict=True):
            total += part
    return found


def _add_slope(
    found: tuple[np.ndarray, np.ndarray],
    channel: Operation,
    angles: tuple[float, ...],
    before: torch.Tensor,
    costate: torch.Tensor,
) -> None:
    """The gradient of a channel's strength: that of tr(O S(p) rho), rho being the density matrix before it."""
    moved = before.clone()
    apply_matrix(moved, channel.targets, channel.derivative(0, angles))
    slope = 2 * float(torch.vdot(costate.reshape(-1), moved.reshape(-1)).real)
    for total, terms in zip(found, channel.terms(), strict=True):
        for index, coefficient in terms:
            total[index] += coefficient * slope


def _kind_of_step(operation: Operation) -> object:
    return id(operation) if operation.parameters and _is_channel(operation) else _is_channel(operation)


def _is_channel(operation: Operation) -> bool:
    return isinstance(operation.gate, Superoperator)


def _has_channels(step: LocalStep) -> bool:
    return isinstance(step, LocalOperations) and _is_channel(step.operations[0])


def _add(matrix: torch.Tensor, coefficient: float, pauli_string: PauliString, wires: int) -> None:
    """Add a Pauli string, whose entries are at (row, row ^ flips)."""
    rows = np.arange(1 << wires)
    values = np.full(len(rows), coefficient, dtype=np.complex128)
    flips = 0
    for wire, pauli in pauli_string:
        bits = rows >> (wires - 1 - wire) & 1
        flips |= (pauli != "Z") << (wires - 1 - wire)
        if pauli != "X":
            values *= 1 - 2 * bits
        if pauli == "Y":
            values *= -1j  # -i in row 0, i in row 1
    matrix[torch.from_numpy(rows), torch.from_numpy(rows ^ flips)] += torch.from_numpy(values)
