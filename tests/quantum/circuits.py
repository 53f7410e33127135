"""Circuits for tests: every gate once, and random ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import GATES
from unisono.quantum.circuit.parameter import Affine, feature, weight

NAMES = sorted(name for name, kind in GATES.items() if kind.unitary)


def random_unitary(draw: np.random.Generator, size: int) -> np.ndarray:
    matrix = draw.normal(size=(size, size)) + 1j * draw.normal(size=(size, size))
    q, r = np.linalg.qr(matrix)
    return q * (np.diagonal(r) / np.abs(np.diagonal(r)))


def random_angle(draw: np.random.Generator, weights: int, features: int) -> Affine | float:
    """A number, a weight, a feature or a sum of them, as long as there are any."""
    angle = Affine(float(draw.uniform(-4, 4)))
    if weights and draw.random() < 0.6:
        angle = angle * 0.5 + float(draw.choice([1.0, -0.5, 2.0])) * weight(int(draw.integers(weights)))
    if features and draw.random() < 0.3:
        angle = angle + feature(int(draw.integers(features)))
    return angle


def random_circuit(
    n: int, gates: int, seed: int, weights: int = 0, features: int = 0, arrays: bool = True, controls: int = 2
) -> Circuit:
    """Gates of every kind on random wires, under random controls; reads at most so many weights and features."""
    draw = np.random.default_rng(seed)
    circuit = Circuit(n)
    kinds: list[Any] = [*NAMES, "pauli_rotation", *(["unitary", "diagonal"] if arrays else [])]
    while len(circuit) < gates:
        kind = str(draw.choice(kinds))
        wires = [int(wire) for wire in draw.permutation(n)]
        if kind == "pauli_rotation":
            word = "".join(draw.choice([*"XYZ"], size=int(draw.integers(1, min(n, 4) + 1))))
            circuit.pauli_rotation(word, wires[: len(word)], random_angle(draw, weights, features))
        elif kind == "unitary":
            k = int(draw.integers(1, min(n, 3) + 1))
            circuit.unitary(random_unitary(draw, 2**k), wires[:k])
        elif kind == "diagonal":
            k = int(draw.integers(1, min(n, 3) + 1))
            circuit.diagonal(np.exp(1j * draw.uniform(-3, 3, size=2**k)), wires[:k])
        elif GATES[kind].targets <= n:
            gate = GATES[kind]
            spare = wires[gate.targets :]
            taken = spare[: int(draw.integers(0, min(len(spare), controls) + 1)) if draw.random() < 0.5 else 0]
            angles = [random_angle(draw, weights, features) for _ in range(gate.parameters)]
            values = {wire: int(draw.integers(2)) for wire in taken}
            circuit.apply(kind, wires[: gate.targets], *angles, controls=values)
    return circuit
