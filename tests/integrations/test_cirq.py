"""Circuits of Cirq, translated with the states, bits and noise of Cirq's own simulators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unisono import quantum as uq
from unisono.errors import UsageError

cirq = pytest.importorskip("cirq", reason="cirq-core is not installed")
pytest.importorskip("numba", reason="numba is not installed")
import sympy  # noqa: E402

Q = cirq.LineQubit.range(4)
a, b, x = sympy.symbols("a b x")


def same(circuit: Any, values: dict[str, float] | None = None) -> None:
    """Equal states, with their phase."""
    values = values or {}
    made = uq.from_cirq(circuit)
    weights = [values[name] for name in sorted(values)]
    expected = cirq.Simulator(dtype=np.complex128).simulate(circuit, values).final_state_vector
    np.testing.assert_allclose(uq.simulate(made, weights).amplitudes().numpy(), expected, atol=1e-9)


def started(*operations: Any) -> Any:
    """The operations on a state without symmetry."""
    start = [(cirq.Y ** (0.3 + 0.1 * i))(q) for i, q in enumerate(Q)] + [
        (cirq.Z ** (0.2 * i))(q) for i, q in enumerate(Q)
    ]
    return cirq.Circuit(start, operations)


POWERS = [cirq.X, cirq.Y, cirq.Z, cirq.H, cirq.CX, cirq.CZ, cirq.CCX, cirq.CCZ]
POWERS += [cirq.SWAP, cirq.ISWAP, cirq.XX, cirq.YY, cirq.ZZ]


@pytest.mark.parametrize("kind", POWERS, ids=str)
def test_powers(kind: Any) -> None:
    qubits = Q[: cirq.num_qubits(kind)][::-1]
    for exponent in (1, 0.5, -0.5, 0.25, -0.25, 0.37, 2.6, -1):
        same(started((kind**exponent)(*qubits), (kind**exponent)(*qubits).controlled_by(Q[3])))
    shifted = type(kind**0.37)(exponent=0.37, global_shift=0.4)
    same(started(shifted(*qubits), cirq.ControlledGate(shifted)(Q[3], *qubits)))
    symbolic = kind ** (a / 2 - 0.3 * b + 0.1)
    same(started(symbolic(*qubits), symbolic(*qubits).controlled_by(Q[3], control_values=[0])), {"a": 0.7, "b": -1.2})


GATES = [
    cirq.I, cirq.S, cirq.T, cirq.CNOT, cirq.CSWAP, cirq.rx(0.3), cirq.ry(-0.4), cirq.rz(1.2), cirq.ms(0.3),
    cirq.FSimGate(0.3, 0.7), cirq.givens(0.3), cirq.PhasedXPowGate(phase_exponent=0.3, exponent=0.6, global_shift=0.1),
    cirq.PhasedISwapPowGate(phase_exponent=0.2, exponent=0.7), cirq.QuantumFourierTransformGate(3),
    cirq.PhasedXZGate(x_exponent=0.2, z_exponent=0.4, axis_phase_exponent=0.3),
    cirq.MatrixGate(cirq.testing.random_unitary(8, random_state=1)), cirq.DiagonalGate([0.1 * i for i in range(8)]),
    cirq.ThreeQubitDiagonalGate([0.1 * i for i in range(8)]), cirq.QubitPermutationGate([2, 0, 1]),
    cirq.DensePauliString("XYZ", coefficient=1j), cirq.BooleanHamiltonianGate(["a", "b"], ["a ^ b"], 0.3),
]  # fmt: skip


@pytest.mark.parametrize("kind", GATES, ids=lambda kind: type(kind).__name__)
def test_gates(kind: Any) -> None:
    qubits = [Q[2], Q[0], Q[1]][: cirq.num_qubits(kind)]
    same(started(kind(*qubits)))
    same(started(kind(*qubits).controlled_by(Q[3])))


@pytest.mark.parametrize("seed", range(12))
def test_random_circuits(seed: int) -> None:
    generator = np.random.default_rng(seed)
    domain = {kind**exponent: cirq.num_qubits(kind) for kind in POWERS for exponent in generator.uniform(-2, 2, 2)}
    domain |= {cirq.ControlledGate(cirq.Y**0.3, control_values=[0]): 2, cirq.CSWAP: 3}
    same(cirq.testing.random_circuit(Q, 12, 0.7, domain, random_state=seed))


def test_gates_with_symbols() -> None:
    kinds = [
        cirq.FSimGate(a, 2 * b - 0.1), cirq.PhasedXPowGate(phase_exponent=a, exponent=b), cirq.Rx(rads=a + b),
        cirq.PhasedXZGate(x_exponent=a, z_exponent=b, axis_phase_exponent=0.3),
    ]  # fmt: skip
    for kind in kinds:
        same(
            started(kind(*Q[: cirq.num_qubits(kind)]), kind(*Q[: cirq.num_qubits(kind)]).controlled_by(Q[3])),
            {"a": 0.6, "b": 0.9},
        )
    string = cirq.PauliStringPhasor(cirq.X(Q[0]) * cirq.Y(Q[2]) * cirq.Z(Q[1]), exponent_neg=a)
    same(started(string), {"a": 0.6})


def test_symbols_are_weights_and_features() -> None:
    circuit = cirq.Circuit(cirq.rx(b)(Q[0]), cirq.CZ(*Q[:2]) ** a, cirq.ry(x / 2 + a)(Q[1]))
    made = uq.from_cirq(circuit, features=["x"])
    assert uq.from_cirq(circuit, features=[x]) == made
    values = {"a": 0.3, "b": 0.8, "x": -0.5}
    expected = cirq.Simulator(dtype=np.complex128).simulate(circuit, values).final_state_vector
    state = uq.simulate(made, [values["a"], values["b"]], [values["x"]])
    np.testing.assert_allclose(state.amplitudes().numpy(), expected, atol=1e-9)


def test_measurements_conditions_and_resets() -> None:
    circuit = cirq.Circuit(
        cirq.X(Q[0]),
        cirq.measure(Q[0], Q[1], key="pair", invert_mask=(False, True)),
        cirq.measure(Q[0], key="one"),
        cirq.X(Q[2]).with_classical_controls("one"),
        cirq.reset(Q[0]),
        cirq.wait(Q[1]),
        cirq.measure(Q[2], Q[0], key="last"),
        cirq.X(Q[3]).with_tags("tagged"),
    )
    made = uq.from_cirq(circuit)
    readings = uq.measured(made, shots=20, seed=1)
    found = cirq.Simulator().run(circuit, repetitions=1)
    expected = "".join(str(bit) for key in ("pair", "one", "last") for bit in found.measurements[key][0])
    assert expected == "11110"
    assert ["".join(map(str, reading)) for reading in readings.tolist()] == [expected] * 20


def test_subcircuits() -> None:
    inner = cirq.FrozenCircuit(cirq.H(Q[0]), cirq.CX(*Q[:2]) ** 0.3)
    same(started(cirq.CircuitOperation(inner, repetitions=3, qubit_map={Q[0]: Q[3], Q[1]: Q[1]})))


def test_channels() -> None:
    circuit = started(
        cirq.depolarize(0.1)(Q[0]), cirq.CX(*Q[:2]), cirq.amplitude_damp(0.3)(Q[1]), cirq.phase_flip(0.2)(Q[2])
    )
    expected = cirq.DensityMatrixSimulator(dtype=np.complex128).simulate(circuit).final_density_matrix
    state = uq.DensityState(4).run(uq.from_cirq(circuit))
    np.testing.assert_allclose(state.matrix().numpy(), expected, atol=1e-9)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: uq.from_cirq(uq.Circuit(2)), "expected a cirq.Circuit"),
    (lambda: uq.from_cirq(cirq.Circuit()), "without qubits"),
    (
        lambda: uq.from_cirq(cirq.Circuit(cirq.IdentityGate(qid_shape=(3,))(cirq.LineQid(0, 3)))),
        "has 3 levels; expected qubits",
    ),
    (
        lambda: uq.from_cirq(cirq.Circuit(cirq.rx(a * b)(Q[0]))),
        "affine in the circuit's symbols; resolve 'a' to a number first",
    ),
    (lambda: uq.from_cirq(cirq.Circuit(cirq.rx(a)(Q[0])), features=["b"]), "'b' is no symbol of the circuit; it has a"),
    (lambda: uq.from_cirq(cirq.Circuit([cirq.measure(Q[0], key="k")] * 2)), "'k' is measured twice"),
    (
        lambda: uq.from_cirq(cirq.Circuit(cirq.measure(*Q[:2], key="k"), cirq.X(Q[2]).with_classical_controls("k"))),
        "expected the key of a measurement of one qubit",
    ),
    (lambda: uq.from_cirq(repeated(repetitions=sympy.Symbol("n"))), "subcircuits with a number of repetitions"),
    (
        lambda: uq.from_cirq(
            repeated(use_repetition_ids=False, repeat_until=cirq.KeyCondition(cirq.MeasurementKey("m")))
        ),
        "subcircuits with a number of repetitions",
    ),
]


def repeated(**options: Any) -> Any:
    inner = cirq.FrozenCircuit(cirq.H(Q[0]), cirq.measure(Q[0], key="m"))
    return cirq.Circuit(cirq.CircuitOperation(inner, **options))


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words[:20] for _, words in REFUSED])
def test_what_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
