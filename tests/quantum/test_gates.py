"""Every gate: its matrix against an independent definition, its derivative, inverse, spectrum and controls."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from tests.quantum import dense
from tests.quantum.circuits import NAMES, random_unitary
from unisono.errors import UsageError
from unisono.quantum.circuit import gates
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import GATES, Gate
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import affine

ANGLES = (0.7, -1.9, 2.6)


def exponential(matrix: np.ndarray) -> np.ndarray:
    """exp(i matrix) of a Hermitian matrix."""
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.exp(1j * values) @ vectors.conj().T


def rotation(word: str, angle: float) -> np.ndarray:
    return exponential(-angle / 2 * gates.pauli_matrix(word))


X, Y, Z = (dense.PAULI[letter] for letter in "XYZ")
ONE = np.diag([0, 1])
A, B, C = ANGLES
XX, YY = np.kron(X, X), np.kron(Y, Y)
U3 = exponential(B * ONE) @ rotation("Y", A) @ exponential(C * ONE)
INDEPENDENT = {
    "id": np.eye(2),
    "x": X,
    "y": Y,
    "z": Z,
    "h": (X + Z) / math.sqrt(2),
    "s": exponential(math.pi / 2 * ONE),
    "sdg": exponential(-math.pi / 2 * ONE),
    "t": exponential(math.pi / 4 * ONE),
    "tdg": exponential(-math.pi / 4 * ONE),
    "sx": exponential(math.pi / 4 * (np.eye(2) - X)),
    "sxdg": exponential(-math.pi / 4 * (np.eye(2) - X)),
    "swap": (np.eye(4) + XX + YY + np.kron(Z, Z)) / 2,
    "iswap": exponential(math.pi / 4 * (XX + YY)),
    "iswapdg": exponential(-math.pi / 4 * (XX + YY)),
    "rx": rotation("X", A),
    "ry": rotation("Y", A),
    "rz": rotation("Z", A),
    "rxx": rotation("XX", A),
    "ryy": rotation("YY", A),
    "rzz": rotation("ZZ", A),
    "rzx": rotation("ZX", A),
    "p": exponential(A * ONE),
    "gphase": np.array([[np.exp(1j * A)]]),
    "u2": exponential(A * ONE) @ rotation("Y", math.pi / 2) @ exponential(B * ONE),
    "u3": U3,
    "rot": rotation("Z", C) @ rotation("Y", B) @ rotation("Z", A),
}


def kinds() -> list[Gate]:
    draw = np.random.default_rng(5)
    made = [gates.pauli_rotation("XYZ"), gates.pauli_rotation("ZZZ"), gates.pauli_rotation("Y")]
    phases = np.exp(1j * draw.uniform(size=8))
    return [*(GATES[name] for name in NAMES), *made, gates.unitary(random_unitary(draw, 8)), gates.diagonal(phases)]


KINDS = pytest.mark.parametrize("kind", kinds(), ids=lambda kind: f"{kind.name}{kind.targets}")


@pytest.mark.parametrize("name", NAMES)
def test_matrix_is_the_definition(name: str) -> None:
    kind = GATES[name]
    assert np.allclose(kind.matrix(*ANGLES[: kind.parameters]), INDEPENDENT[name], atol=1e-15)


@KINDS
def test_unitary_diagonal_and_inverse(kind: Gate) -> None:
    angles = ANGLES[: kind.parameters]
    matrix = kind.matrix(*angles)
    assert matrix.shape == (2**kind.targets, 2**kind.targets)
    assert np.allclose(matrix @ matrix.conj().T, np.eye(len(matrix)), atol=1e-14)
    assert kind.diagonal == (not np.any(matrix - np.diag(np.diagonal(matrix)))) or kind.name == "unitary"
    if kind.diagonal:
        assert np.allclose(np.diag(kind.entries(*angles)), matrix, atol=1e-15)
    inverse, parameters = kind.inverse(tuple(affine(angle) for angle in angles))
    undone = inverse.matrix(*(parameter.evaluate() for parameter in parameters))
    assert np.allclose(undone @ matrix, np.eye(len(matrix)), atol=1e-14)


@KINDS
def test_derivative_and_spectrum(kind: Gate) -> None:
    angles, step = ANGLES[: kind.parameters], 1e-5
    assert len(kind.spectra) == kind.parameters
    for which in range(kind.parameters):
        moved = [[a + sign * step * (index == which) for index, a in enumerate(angles)] for sign in (1, -1)]
        numeric = (kind.matrix(*moved[0]) - kind.matrix(*moved[1])) / (2 * step)
        exact = kind.derivative(which, *angles)
        assert np.allclose(exact, numeric, atol=1e-9)
        generator = -1j * exact @ kind.matrix(*angles).conj().T  # dU = i G U
        found = np.linalg.eigvalsh(generator)
        assert np.allclose(sorted(set(np.round(found, 9))), sorted(kind.spectra[which]))


@KINDS
def test_travels_between_processes(kind: Gate) -> None:
    arrived = pickle.loads(pickle.dumps(kind))
    assert arrived == kind
    angles = ANGLES[: kind.parameters]
    assert np.array_equal(arrived.matrix(*angles), kind.matrix(*angles))


@KINDS
@pytest.mark.parametrize("values", [(1,), (0,), (1, 0)])
def test_controls(kind: Gate, values: tuple[int, ...]) -> None:
    n = kind.targets + len(values)
    wires = tuple(np.random.default_rng(n).permutation(n).tolist())
    targets, taken = wires[: kind.targets], wires[kind.targets :]
    circuit = Circuit(n).apply(
        kind, targets, *ANGLES[: kind.parameters], controls=dict(zip(taken, values, strict=True))
    )
    (operation,) = circuit.operations
    angles = operation.angles()
    assert np.allclose(dense.expanded(operation.full_matrix(angles), operation.wires, n), dense.unitary(circuit))
    for which in range(kind.parameters):
        matrix = operation.full_derivative(which, angles)
        generator = -1j * matrix @ operation.full_matrix(angles).conj().T
        found = np.round(np.linalg.eigvalsh(generator), 9)
        gaps = {abs(a - b) for a in found for b in found} - {0.0}
        assert np.allclose(sorted(gaps), operation.frequencies(which))


@pytest.mark.parametrize("word", ["X", "XYZ", "YYXZ", "ZZ"])
@pytest.mark.parametrize("controls", [{}, {5: 0}])
def test_pauli_rotation_lowered(word: str, controls: dict[int, int]) -> None:
    circuit = Circuit(6).apply(gates.pauli_rotation(word), range(len(word)), 0.83, controls=controls)
    lowered = Circuit(6)
    for operation in circuit.operations[0].lowered():
        assert isinstance(operation, Operation)
        assert operation.is_diagonal or len(operation.wires) == 1
        lowered.append(operation)
    assert np.allclose(dense.unitary(lowered), dense.unitary(circuit), atol=1e-14)


def test_heavy_diagonal_rotation_has_entries_but_no_matrix() -> None:
    kind = gates.pauli_rotation("Z" * 14)
    assert kind.entries(0.5).shape == (2**14,)
    with pytest.raises(UsageError, match="too large"):
        kind.matrix(0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gates.unitary([[1, 0], [0, 2]]), "not unitary.*differs from the identity by 3"),
        (lambda: gates.unitary([[1, 1], [0, 1]]), "not unitary"),
        (lambda: gates.unitary([[float("nan"), 0], [0, 1]]), "not unitary"),
        (lambda: gates.unitary(np.eye(3)), r"shape \(3, 3\)"),
        (lambda: gates.unitary(np.ones(4)), r"shape \(4,\)"),
        (lambda: gates.unitary(1), r"shape \(\)"),
        (lambda: gates.diagonal([1, 0.5]), "modulus differs from 1 by 0.5"),
        (lambda: gates.diagonal([1, 1, 1]), r"shape \(3,\)"),
        (lambda: gates.pauli_rotation("XA"), "'XA'"),
        (lambda: gates.gate("cnott"), "'cnott' is not known"),
        (lambda: gates.MEASURE.matrix(), "measure has no matrix"),
        (lambda: gates.RESET.inverse(()), "reset has no inverse"),
    ],
)
def test_bad_gates(make: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()  # type: ignore[operator]
