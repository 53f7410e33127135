"""The templates: their shapes, and what they mean on dense matrices."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from tests.quantum import dense
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.templates import (
    excitation_strings,
    excitations,
    hardware_efficient,
    maxcut,
    qaoa,
    strongly_entangling,
    uccsd,
)
from unisono.quantum.observables.observable import X, Y, Z


def exponential(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.exp(1j * values) @ vectors.conj().T


def test_hardware_efficient() -> None:
    circuit = hardware_efficient(4, depth=3)
    assert circuit.weights == 24
    assert circuit.counts() == {"ry": 12, "rz": 12, "cx": 12}
    assert hardware_efficient(4, 1, ["rx"], "cz_line").counts() == {"rx": 4, "cz": 3}
    assert hardware_efficient(2, 1).counts()["cx"] == 1
    assert "cx" not in hardware_efficient(1, 2).counts()


def test_strongly_entangling_reaches_further_layer_by_layer() -> None:
    circuit = strongly_entangling(4, layers=4)
    assert circuit.weights == 48
    pairs = [each.wires for each in circuit.operations if each.controls]
    assert pairs[:4] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert pairs[4] == (0, 2)
    assert pairs[8] == (0, 3)
    assert pairs[12] == (0, 1)
    assert strongly_entangling(1, 2).counts() == {"rot": 2}


def test_maxcut_and_qaoa() -> None:
    edges = [(0, 1), (1, 2), (2, 0, 0.5)]
    sharded = maxcut(edges)
    values = np.diagonal(dense.observable_matrix(sharded, 3)).real
    assert values.tolist() == [0, 1.5, 2, 1.5, 1.5, 2, 1.5, 0]
    gamma, beta = 0.7, -0.3
    mixer = dense.observable_matrix(X(0) + X(1) + X(2), 3)
    expected = exponential(-beta * mixer) @ (np.exp(-1j * gamma * values) * np.full(8, 8**-0.5))
    found = dense.state(qaoa(edges, layers=1), [gamma, beta])
    assert np.isclose(abs(np.vdot(found, expected)), 1)
    assert qaoa(sharded, layers=2, wires=5).wires == 5
    assert qaoa(Z(0) @ Z(1) @ Z(2) + 0.5 * Z(1), layers=1).counts() == {"h": 3, "pauli_rotation": 2, "rx": 3}


def annihilator(wire: int, n: int) -> np.ndarray:
    lower = np.array([[0, 1], [0, 0]])
    parts = [dense.PAULI["Z"]] * wire + [lower] + [np.eye(2)] * (n - wire - 1)
    return reduce(np.kron, parts)


@pytest.mark.parametrize(("holes", "particles"), [((0,), (2,)), ((1,), (3,)), ((0, 1), (2, 3))])
def test_excitation_is_the_fermionic_exponential(holes: tuple[int, ...], particles: tuple[int, ...]) -> None:
    n, angle = 4, 0.37
    lowers = reduce(np.matmul, [annihilator(wire, n) for wire in reversed(holes)])
    raises = reduce(np.matmul, [annihilator(wire, n).conj().T for wire in particles])
    excitation = raises @ lowers
    generator = excitation - excitation.conj().T
    circuit = Circuit(n)
    for coefficient, word in excitation_strings(holes, particles):
        letters, wires = "".join(letter for _, letter in word), [wire for wire, _ in word]
        circuit.pauli_rotation(letters, wires, -2 * coefficient * angle)
    assert np.allclose(dense.unitary(circuit), exponential(-1j * angle * generator), atol=1e-12)


def test_uccsd_keeps_particles_and_spin() -> None:
    circuit = uccsd(4, electrons=2, steps=2)
    assert circuit.weights == len(excitations(4, 2)) == 3
    found = dense.state(circuit, [0.3, -0.2, 0.9])
    number = sum(((1 - Z(wire)) / 2 for wire in range(4)), start=0 * Z(0))
    spin = Z(0) - Z(1) + Z(2) - Z(3)
    for conserved, value in ((number, 2.0), (spin, 0.0)):
        assert np.isclose(dense.expectation(found, conserved), value)
        assert np.isclose(dense.variance(found, conserved), 0, atol=1e-12)
    assert not np.allclose(found, dense.state(uccsd(4, 2), [0, 0, 0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hardware_efficient(3, 1, entangler="cnot_star"), "'cnot_star': expected one of cnot_ring"),
        (lambda: hardware_efficient(3, -1), "depth=-1"),
        (lambda: qaoa(X(0) @ X(1), 1), "expected only Z"),
        (lambda: qaoa(Z(4), 1, wires=3), "wire 4"),
        (lambda: maxcut([(1, 1)]), "two different wires"),
        (lambda: maxcut([(0.5, 1)]), "two different wires"),
        (lambda: hardware_efficient(3, 1.5), "depth=1.5: expected a whole number of at least 0"),  # type: ignore[arg-type]
        (lambda: uccsd(4, 4), "expected 1 to 3 electrons"),
        (lambda: uccsd(4, 2, steps=0), "steps=0"),
        (lambda: qaoa(Y(0), 1), "expected only Z"),
    ],
)
def test_refused(make: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()  # type: ignore[operator]
