"""One operation of a circuit: a gate on targets, under controls, with angles.

Wire 0 is the most significant bit of the state's index; of a gate's matrix, the first target is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.errors import UsageError
from unisono.quantum.circuit.gates import Gate, Matrix, PauliRotation, gate, pauli_rotation
from unisono.quantum.circuit.parameter import Affine, Terms

Controls = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """`controls` are (wire, value) pairs. A measurement writes the classical `bits`; `condition` holds (bit, value)
    pairs, without which the operation does not happen."""

    gate: Gate
    targets: tuple[int, ...]
    controls: Controls = ()
    parameters: tuple[Affine, ...] = ()
    bits: tuple[int, ...] = ()
    condition: Controls = ()

    def check_form(self) -> None:
        """Refuse fields of the wrong types, which `Circuit.append` could not look into."""
        if not isinstance(self.gate, Gate):
            raise UsageError(f"operation with the gate {self.gate!r}: expected a Gate, such as uq.Circuit.apply finds")
        for name in ("targets", "controls", "parameters", "bits", "condition"):
            if not isinstance(getattr(self, name), tuple):
                raise UsageError(f"{self.gate.name} with {name}={getattr(self, name)!r}: expected a tuple")
        for pair in (*self.controls, *self.condition):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise UsageError(f"{self.gate.name} is controlled by {pair!r}: expected (wire or bit, 0 or 1)")
        for each in self.parameters:
            if not isinstance(each, Affine):
                raise UsageError(f"{self.gate.name} with the angle {each!r}: expected an Affine")

    @property
    def name(self) -> str:
        return self.gate.name

    @property
    def wires(self) -> tuple[int, ...]:
        """Controls first, then targets."""
        return (*[wire for wire, _ in self.controls], *self.targets) if self.controls else tuple(self.targets)

    @property
    def is_unitary(self) -> bool:
        """False for measurement, reset, barrier and channels, and for what depends on a measured bit."""
        return self.gate.unitary and not self.condition

    @property
    def is_diagonal(self) -> bool:
        return self.gate.diagonal

    @property
    def is_constant(self) -> bool:
        return all(parameter.is_constant for parameter in self.parameters)

    def angles(self, weights: Any = (), features: Any = ()) -> tuple[Any, ...]:
        return tuple([parameter.evaluate(weights, features) for parameter in self.parameters])

    def matrix(self, angles: Sequence[float] = ()) -> Matrix:
        """The gate's matrix on its targets, without controls."""
        return self.gate.matrix(*angles)

    def derivative(self, which: int, angles: Sequence[float]) -> Matrix:
        return self.gate.derivative(which, *angles)

    def entries(self, angles: Sequence[float] = ()) -> Matrix:
        """The diagonal on the targets, of a diagonal operation."""
        return self.gate.entries(*angles)

    def full_matrix(self, angles: Sequence[float] = ()) -> Matrix:
        """The matrix on `wires`, controls included."""
        return self._embed(self.matrix(angles), outside=1.0)

    def full_derivative(self, which: int, angles: Sequence[float]) -> Matrix:
        return self._embed(self.derivative(which, angles), outside=0.0)

    def frequencies(self, which: int) -> tuple[float, ...]:
        """The frequencies of an expectation as a function of parameter `which`: what a parameter-shift rule needs."""
        values = {*self.gate.spectra[which], *([0.0] if self.controls else [])}
        return tuple(sorted({abs(a - b) for a in values for b in values} - {0.0}))

    def inverse(self) -> Operation:
        if self.condition:
            raise UsageError(f"{self} depends on a measured bit; it has no inverse")
        kind, parameters = self.gate.inverse(self.parameters)
        return replace(self, gate=kind, parameters=parameters)

    def controlled(self, controls: Controls) -> Operation:
        """The same under further controls."""
        if not self.gate.unitary:
            return self if self.name == "barrier" else _refuse_control(self)
        return replace(self, controls=(*controls, *self.controls))

    def on(self, wires: Sequence[int] | Mapping[int, int]) -> Operation:
        """The same with wire w moved to wires[w]."""
        targets = tuple(wires[wire] for wire in self.targets)
        controls = tuple((wires[wire], value) for wire, value in self.controls)
        stays = targets == self.targets and controls == self.controls
        return self if stays else replace(self, targets=targets, controls=controls)

    def lowered(self) -> tuple[Operation, ...]:
        """Operations of gates with small matrices or diagonals: a Pauli rotation becomes basis changes around Z...Z.

        The basis changes need no controls: without the rotation they cancel."""
        kind = self.gate
        if not isinstance(kind, PauliRotation) or kind.diagonal:
            return (self,)
        change = {"X": ("h", "h"), "Y": ("sx", "sxdg")}
        pairs = [
            (target, change[pauli]) for target, pauli in zip(self.targets, kind.paulis, strict=True) if pauli in change
        ]
        before = [Operation(gate(pair[0]), (target,), condition=self.condition) for target, pair in pairs]
        after = [Operation(gate(pair[1]), (target,), condition=self.condition) for target, pair in pairs]
        return (*before, replace(self, gate=pauli_rotation("Z" * kind.targets)), *after)

    def terms(self) -> tuple[Terms, Terms]:
        """All (index, coefficient) terms of weights, and of features, over the parameters."""
        weights = tuple(term for parameter in self.parameters for term in parameter.weights)
        return weights, tuple(term for parameter in self.parameters for term in parameter.features)

    def __str__(self) -> str:
        label = self.gate.paulis if isinstance(self.gate, PauliRotation) else self.name
        angles = f"({', '.join(map(str, self.parameters))})" if self.parameters else ""
        controls = "".join(f" {'' if value else '!'}{wire}" for wire, value in self.controls)
        return f"{label}{angles}{' if' + controls if controls else ''} on {' '.join(map(str, self.targets)) or 'all'}"

    def _embed(self, matrix: Matrix, outside: float) -> Matrix:
        if not self.controls:
            return matrix
        size = 2 ** len(self.wires)
        full = np.zeros((size, size), dtype=np.complex128)
        np.fill_diagonal(full, outside)
        block = len(matrix)
        start = block * int("".join(str(value) for _, value in self.controls), 2)
        full[start : start + block, start : start + block] = matrix
        return full


def _refuse_control(operation: Operation) -> Operation:
    raise UsageError(f"{operation} cannot be controlled: it is no unitary gate")
