"""The reference: dense vectors and matrices, wire 0 the most significant bit. Slow, short, and right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

PAULI = {"I": np.eye(2), "X": np.array([[0, 1], [1, 0]]), "Y": np.array([[0, -1j], [1j, 0]]), "Z": np.diag([1, -1])}
PROJECTOR = {0: np.diag([1, 0]), 1: np.diag([0, 1])}


def expanded(matrix: np.ndarray, wires: Sequence[int], n: int) -> np.ndarray:
    """A matrix on `wires` as a (2^n, 2^n) matrix: kron with the identity, then reorder the wires."""
    rest = [wire for wire in range(n) if wire not in wires]
    full = np.kron(matrix, np.eye(2 ** len(rest))).reshape([2] * (2 * n))
    order = list(np.argsort([*wires, *rest]))
    return full.transpose(order + [n + axis for axis in order]).reshape(2**n, 2**n)


def operator(operation: Any, angles: Sequence[float], n: int) -> np.ndarray:
    """The (2^n, 2^n) matrix: the gate where the controls hold, the identity elsewhere."""
    index = np.arange(2**n)
    holds = reduce(np.multiply, [(index >> (n - 1 - w) & 1) == v for w, v in operation.controls], np.ones(2**n))
    return holds[:, None] * expanded(operation.matrix(angles), operation.targets, n) + np.diag(1 - holds)


def unitary(circuit: Any, weights: Sequence[float] = (), features: Sequence[float] = ()) -> np.ndarray:
    gates = [o for o in circuit.operations if o.name != "barrier"]
    matrices = [operator(each, each.angles(weights, features), circuit.wires) for each in gates]
    return reduce(lambda total, matrix: matrix @ total, matrices, np.eye(2**circuit.wires, dtype=complex))


def state(circuit: Any, weights: Sequence[float] = (), features: Sequence[float] = ()) -> np.ndarray:
    vector = np.eye(1, 2**circuit.wires, dtype=complex)[0]
    for each in circuit.operations:
        if each.name != "barrier":
            vector = operator(each, each.angles(weights, features), circuit.wires) @ vector
    return vector


def branches(circuit: Any) -> list[tuple[float, tuple[int, ...], np.ndarray]]:
    """(probability, bits, state) of every course that a circuit with measurements and resets can take."""
    n, zero = circuit.wires, np.eye(1, 2**circuit.wires, dtype=complex)[0]
    courses = [(1.0, (0,) * circuit.bits, zero)]
    for each in (o for o in circuit.operations if o.name != "barrier"):
        after = []
        for (chance, bits, vector), outcome in product(courses, (0, 1)):
            if any(bits[bit] != value for bit, value in each.condition):
                after += [(chance, bits, vector)] * (outcome == 0)
            elif each.name not in ("measure", "reset"):
                after += [(chance, bits, operator(each, each.angles(), n) @ vector)] * (outcome == 0)
            else:
                part = expanded(PROJECTOR[outcome], each.targets, n) @ vector
                share = np.vdot(part, part).real
                if share > 1e-12:
                    written = [outcome if axis in each.bits else bit for axis, bit in enumerate(bits)]
                    flip = expanded(PAULI["X"], each.targets, n) if outcome and each.name == "reset" else np.eye(2**n)
                    after.append((chance * share, tuple(written), flip @ part / np.sqrt(share)))
        courses = after
    return courses


def observable_matrix(observable: Any, n: int) -> np.ndarray:
    """A PauliSum as a (2^n, 2^n) matrix."""
    total = np.zeros((2**n, 2**n), dtype=complex)
    for coefficient, word in observable.terms:
        total += coefficient * reduce(np.kron, [PAULI[dict(word).get(wire, "I")] for wire in range(n)])
    for block in observable.blocks:
        total += block.coefficient * expanded(block.matrix, block.wires, n)
    for coefficient, values in observable.projectors:
        total += coefficient * reduce(np.matmul, [expanded(PROJECTOR[v], [w], n) for w, v in values], np.eye(2**n))
    return total


def expectation(vector: np.ndarray, observable: Any) -> float:
    matrix = observable_matrix(observable, len(vector).bit_length() - 1)
    return np.vdot(vector, matrix @ vector).real


def variance(vector: np.ndarray, observable: Any) -> float:
    matrix = observable_matrix(observable, len(vector).bit_length() - 1)
    return np.vdot(vector, matrix @ matrix @ vector).real - expectation(vector, observable) ** 2


def reduced(vector: np.ndarray, wires: Sequence[int]) -> np.ndarray:
    """The reduced density matrix of `wires`, the first most significant."""
    n = len(vector).bit_length() - 1
    rest = [wire for wire in range(n) if wire not in wires]
    matrix = vector.reshape([2] * n).transpose([*wires, *rest]).reshape(2 ** len(wires), -1)
    return matrix @ matrix.conj().T


def probabilities(vector: np.ndarray, wires: Sequence[int]) -> np.ndarray:
    return np.diagonal(reduced(vector, wires)).real
