"""A layer's outputs estimated from shots.

Pauli strings that can be read off the same shots (on each wire they have the same Pauli, or the identity) share a
basis, and each basis has its own `shots` shots. Where the circuit is unitary, its state is made once, rotated from
basis to basis and sampled; with channels, or measurements that were not deferred, each shot is a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.gradients.layer_outputs import Expectations, Probabilities
from unisono.quantum.observables.expectation import TO_Z
from unisono.quantum.observables.observable import PauliString, Values
from unisono.quantum.outputs import samples_from
from unisono.quantum.shots import walk
from unisono.quantum.state import State

Basis = dict[int, str]  # the Pauli that is read on each wire


class ShotEstimates:
    def __init__(self, output: Expectations | Probabilities, shots: int) -> None:
        self.output, self.shots = output, shots
        strings: list[PauliString] = [tuple((wire, "Z") for wire in range(output.wires))]
        if isinstance(output, Expectations):
            projected = {_as_string(values) for each in output.observed.projectors for _, values in each}
            strings = [each for each in {*output.observed.pauli_strings, *projected} if each]
        self.bases, self._basis_of = measurement_bases(strings)

    def of_state(self, state: State, seed: Sequence[int]) -> torch.Tensor:
        """From a circuit's state, which is rotated on the way."""
        current: Basis = {}
        readings = []
        for number, basis in enumerate(self.bases):
            draws = np.random.default_rng([*seed, number])
            readings.append(_read(state, current, basis, self.shots, partial(draws.random, self.shots)))
            current = basis
        return self._outputs(readings)

    def of_trajectories(
        self, circuit: Circuit, state: State, given: tuple[Any, Any], seed: Sequence[int]
    ) -> torch.Tensor:
        """From a state |0...0> that each shot takes through the circuit by itself."""
        readings = [np.zeros((self.shots, len(basis)), dtype=np.uint8) for basis in self.bases]

        def arrive(course: State, numbers: np.ndarray, draws: list[np.random.Generator]) -> None:
            current: Basis = {}
            for number, basis in enumerate(self.bases):
                mine = np.flatnonzero(numbers // self.shots == number)
                if len(mine):
                    uniforms = partial(_one_of_each, [draws[at] for at in mine])
                    read = _read(course, current, basis, len(mine), uniforms)
                    readings[number][numbers[mine] - number * self.shots] = read
                    current = basis

        walk(circuit, state, np.arange(self.shots * len(self.bases)), given, seed, arrive)
        return self._outputs(readings)

    def _outputs(self, readings: list[np.ndarray]) -> torch.Tensor:
        output = self.output
        if isinstance(output, Probabilities):
            index = readings[0] @ (1 << np.arange(output.wires - 1, -1, -1))
            return torch.from_numpy(np.bincount(index, minlength=output.width) / self.shots).to(output.dtype)
        signs = [1 - 2 * reading.astype(np.int8) for reading in readings]
        value_of = {
            each: float(signs[number][:, columns].prod(1).mean()) for each, (number, columns) in self._basis_of.items()
        }
        value_of[()] = 1.0
        found = [sum(coefficient * value_of[each] for coefficient, each in terms) for terms in output.observed.sums]
        for at, projectors in enumerate(output.observed.projectors):
            for coefficient, values in projectors:
                number, columns = self._basis_of[_as_string(values)]
                matches = readings[number][:, columns] == [bit for _, bit in values]
                found[at] += coefficient * float(matches.all(1).mean())
        return torch.tensor(found, dtype=output.dtype)


def measurement_bases(strings: Iterable[PauliString]) -> tuple[list[Basis], dict[PauliString, tuple[int, list[int]]]]:
    """Few bases for all Pauli strings, greedily, and each string's basis and columns in its readings."""
    bases: list[Basis] = []
    number_of: dict[PauliString, int] = {}
    for each in sorted(strings, key=lambda string: (-len(string), string)):
        fits = (at for at, basis in enumerate(bases) if all(basis.get(wire, pauli) == pauli for wire, pauli in each))
        number = next(fits, len(bases))
        if number == len(bases):
            bases.append({})
        bases[number].update(each)
        number_of[each] = number
    bases = [dict(sorted(basis.items())) for basis in bases]
    place = [{wire: column for column, wire in enumerate(basis)} for basis in bases]
    return bases, {each: (at, [place[at][wire] for wire, _ in each]) for each, at in number_of.items()}


def _as_string(values: Values) -> PauliString:
    return tuple((wire, "Z") for wire, _ in values)


def _read(state: State, current: Basis, basis: Basis, shots: int, uniforms: Callable[[], Any]) -> np.ndarray:
    """Shots of the basis's wires, (shots, wires), from a state that was rotated to read the current basis."""
    change = Circuit(state.wires)
    for wire in sorted({*current, *basis}):
        before, after = current.get(wire, "Z"), basis.get(wire, "Z")
        if before != after:
            for pauli, back in ((before, True), (after, False)):
                if pauli != "Z":
                    change.apply(TO_Z[pauli][back], wire)
    if len(change):
        state.run(change)
    return samples_from(state, shots, tuple(basis), uniforms).numpy()


def _one_of_each(draws: Sequence[np.random.Generator]) -> np.ndarray:
    return np.array([each.random() for each in draws])
