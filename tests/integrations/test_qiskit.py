"""Circuits of Qiskit: translated with equal states, and run with the results of Qiskit's own primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import RankPool
from unisono import quantum as uq
from unisono.errors import UsageError

qiskit = pytest.importorskip("qiskit", reason="qiskit is not installed")
pytest.importorskip("numba", reason="numba is not installed")
from qiskit import ClassicalRegister, QuantumCircuit, QuantumRegister, transpile  # noqa: E402
from qiskit.circuit import Gate, Parameter, ParameterVector  # noqa: E402
from qiskit.circuit import library as ql  # noqa: E402
from qiskit.circuit.random import random_circuit  # noqa: E402
from qiskit.primitives import BackendSamplerV2, StatevectorEstimator, StatevectorSampler  # noqa: E402
from qiskit.quantum_info import DensityMatrix, Kraus, Operator, SparsePauliOp, Statevector, SuperOp  # noqa: E402

from unisono.integrations.qiskit import UnisonoBackend, UnisonoEstimator, UnisonoSampler  # noqa: E402

Pools = Callable[[str, int], RankPool]
STANDARD = {
    name: each
    for name, each in ql.get_standard_gate_name_mapping().items()
    if name not in ("measure", "reset", "delay")
}


def amplitudes(circuit: Any, weights: Any = ()) -> np.ndarray:
    """In Qiskit's order: qubit 0 is the least significant bit."""
    made = uq.from_qiskit(circuit)
    state = uq.simulate(made, weights).amplitudes().numpy()
    return state.reshape((2,) * made.wires).transpose(*reversed(range(made.wires))).reshape(-1)


def same(circuit: Any) -> None:
    np.testing.assert_allclose(amplitudes(circuit), Statevector(circuit).data, atol=1e-10)


def with_start(qubits: int) -> Any:
    circuit = QuantumCircuit(qubits)
    for qubit in range(qubits):
        circuit.ry(0.4 + qubit, qubit)
        circuit.p(0.7 * qubit, qubit)
    return circuit


# ---- from_qiskit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(STANDARD))
def test_every_standard_gate(name: str) -> None:
    kind = STANDARD[name]
    angles = np.random.default_rng(len(name)).uniform(-3, 3, len(kind.params))
    gate = type(kind)(*angles) if len(angles) else kind
    circuit = with_start(max(gate.num_qubits, 1))
    circuit.append(gate, range(gate.num_qubits))
    same(circuit)
    if gate.num_qubits and gate.num_qubits < 4:
        for annotated in (False, True):
            controlled = with_start(gate.num_qubits + 2)
            controlled.append(gate.control(2, ctrl_state=1, annotated=annotated), range(gate.num_qubits + 2))
            same(controlled)


@pytest.mark.parametrize("seed", range(12))
def test_random_circuits(seed: int) -> None:
    circuit = random_circuit(4, 8, max_operands=4, seed=seed)
    circuit.global_phase = 0.3
    same(circuit)


GATES = [
    ql.UnitaryGate(Operator(random_circuit(3, 3, seed=1))),
    ql.DiagonalGate([1, 1j, -1, 1]),
    ql.PauliGate("XYZ"),
    ql.StatePreparation([0.6, 0, 0, 0.8j]),
    ql.PauliEvolutionGate(SparsePauliOp(["XX", "ZZ"], [0.3, 0.4]), 1.2),
    ql.PermutationGate([1, 2, 0]),
    ql.MCXGate(3, ctrl_state=2),
    ql.QFTGate(3),
    ql.QFTGate(2).inverse(annotated=True),
    ql.HGate().power(0.3),
]


@pytest.mark.parametrize("gate", GATES, ids=[gate.name for gate in GATES])
def test_gates_of_the_library(gate: Any) -> None:
    circuit = with_start(gate.num_qubits)
    circuit.append(gate, list(reversed(range(gate.num_qubits))))
    same(circuit)


def test_gates_that_users_define() -> None:
    inner = QuantumCircuit(2, name="mine", global_phase=0.4)
    inner.h(0)
    inner.cx(0, 1)
    gate = inner.to_gate()
    named = Gate("h", 1, [])  # Qiskit's name for another gate
    named.definition = QuantumCircuit(1)
    named.definition.t(0)
    circuit = with_start(4)
    circuit.append(gate, [2, 0])
    circuit.append(gate.control(1, ctrl_state=0, annotated=False), [1, 3, 0])
    twice = gate.control(1, annotated=True).inverse(annotated=True).control(1, ctrl_state=0, annotated=True)
    circuit.append(twice, [3, 1, 0, 2])
    circuit.append(named, [1])
    same(circuit)


def test_parameters_are_weights_and_features() -> None:
    theta, x = ParameterVector("theta", 11), Parameter("x")
    circuit = QuantumCircuit(2)
    for number in range(11):
        circuit.ry(theta[number] / 2 - 0.3, number % 2)
        circuit.rz(2 * x - theta[0] + 0.1, 0)
        circuit.cx(0, 1)
    values = np.linspace(0, 1, 12)
    bound = Statevector(circuit.assign_parameters(dict(zip(circuit.parameters, values, strict=True))))
    np.testing.assert_allclose(amplitudes(circuit, values), bound.data, atol=1e-10)
    made = uq.from_qiskit(circuit, features=["x"])
    assert (made.weights, made.features) == (11, 1)
    assert uq.from_qiskit(circuit, features=[x]) == made
    given = dict(zip(circuit.parameters, values, strict=True))
    weights = [given[each] for each in theta]
    state = uq.simulate(made, weights, [given[x]]).amplitudes().numpy().reshape(2, 2).T.reshape(-1)
    np.testing.assert_allclose(state, bound.data, atol=1e-10)


def test_bits_conditions_and_loops() -> None:
    first, second = ClassicalRegister(2, "first"), ClassicalRegister(1, "second")
    circuit = QuantumCircuit(QuantumRegister(3), first, second)
    circuit.x(0)
    circuit.measure(0, first[1])
    with circuit.if_test((first, 2)):
        circuit.x(1)
    with circuit.if_test((first[1], 1)) as otherwise:
        circuit.reset(0)
        with circuit.if_test((first[0], 0)):
            circuit.x(0)
    with otherwise:
        circuit.x(2)
    with circuit.for_loop(range(3)):
        circuit.x(2)
    circuit.delay(10, 0)
    circuit.barrier()
    circuit.measure(2, second[0])
    made = uq.from_qiskit(circuit)
    assert (made.wires, made.bits) == (3, 3)
    made.measure(0, 3).measure(1, 4)
    assert uq.measured(made, 3, seed=1).tolist() == [[0, 1, 1, 1, 1]] * 3


# ---- primitives -----------------------------------------------------------------------------------------------------


def sweep() -> tuple[Any, np.ndarray]:
    circuit, angles = random_circuit(4, 4, seed=5), ParameterVector("a", 3)
    for number in range(3):
        circuit.rx(angles[number], number)
        circuit.crz(2 * angles[number], number, number + 1)
    return circuit, np.random.default_rng(1).uniform(-3, 3, size=(2, 5, 3))


OBSERVABLES = [[[SparsePauliOp(["XXII", "IYZZ", "IIII"], [0.5, -0.3, 2.0])]], [["ZIIX"]]]


def results(comm: Any) -> dict[str, Any]:
    circuit, values = sweep()
    measured = circuit.copy()
    measured.measure_all()
    sampled = UnisonoSampler(seed=7).run([(measured, values[0])], shots=50).result()[0]
    return {
        "evs": UnisonoEstimator().run([(circuit, OBSERVABLES, values)]).result()[0].data.evs,
        "bits": sampled.data.meas.array,
        "ranks": UnisonoSampler().ranks,
        "one": UnisonoSampler(seed=1).run([one_qubit()], shots=20).result()[0].data.c.get_bitstrings(),
    }


def one_qubit() -> Any:
    circuit = QuantumCircuit(1, 1)
    circuit.h(0)
    circuit.measure(0, 0)
    circuit.x(0)
    return circuit


def test_estimator_equals_that_of_qiskit() -> None:
    circuit, values = sweep()
    found = UnisonoEstimator().run([(circuit, OBSERVABLES, values), (circuit, "ZZZZ", values[0, 0])]).result()
    expected = StatevectorEstimator().run([(circuit, OBSERVABLES, values), (circuit, "ZZZZ", values[0, 0])]).result()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.data.evs.shape == theirs.data.evs.shape
        np.testing.assert_allclose(ours.data.evs, theirs.data.evs, atol=1e-10)
        np.testing.assert_allclose(ours.data.stds, 0)
    bound = Statevector(circuit.assign_parameters(values[0, 0]))
    projected = UnisonoEstimator().run([(circuit, "I01+", values[0, 0])]).result()[0].data.evs
    plus = (SparsePauliOp("IIII") + SparsePauliOp("IIIX")) / 2
    terms = SparsePauliOp(["IIII", "IZII"], [0.5, 0.5]) @ SparsePauliOp(["IIII", "IIZI"], [0.5, -0.5]) @ plus
    assert projected == pytest.approx(bound.expectation_value(terms).real, abs=1e-10)
    noisy = UnisonoEstimator(seed=1).run([(circuit, "ZZZZ", values)], precision=0.01).result()[0].data
    exact = UnisonoEstimator().run([(circuit, "ZZZZ", values)]).result()[0].data.evs
    assert 0 < np.abs(noisy.evs - exact).max() < 0.05
    np.testing.assert_allclose(noisy.stds, 0.01)


@pytest.mark.parametrize("seed", range(3))
def test_sampler_follows_the_probabilities(seed: int) -> None:
    first, second = ClassicalRegister(2, "first"), ClassicalRegister(3, "second")
    circuit = QuantumCircuit(QuantumRegister(4), first, second)
    circuit.compose(random_circuit(4, 4, seed=seed), inplace=True)
    probabilities = Statevector(circuit).probabilities([3, 0, 2])
    circuit.measure([3, 0], first)
    circuit.measure(2, second[1])
    shots = 20_000
    data = UnisonoSampler(seed=seed).run([circuit], shots=shots).result()[0].data
    theirs = StatevectorSampler(seed=seed).run([circuit], shots=10).result()[0].data
    assert (data.first.num_bits, data.second.num_bits) == (theirs.first.num_bits, theirs.second.num_bits)
    bits = data.first.to_bool_array(order="little"), data.second.to_bool_array(order="little")
    assert not bits[1][:, [0, 2]].any()
    index = bits[0][:, 0] + 2 * bits[0][:, 1] + 4 * bits[1][:, 1]
    found = np.bincount(index, minlength=8)
    assert np.all(np.abs(found - shots * probabilities) < 5 * np.sqrt(shots * probabilities) + 1e-6)


def test_shapes_of_samples_are_those_of_qiskit() -> None:
    circuit, values = sweep()
    circuit.measure_all()
    ours, theirs = (
        kind.run([(circuit, values)], shots=8).result()[0].data.meas
        for kind in (UnisonoSampler(), StatevectorSampler())
    )
    assert ours.shape == theirs.shape == (2, 5)
    assert ours.array.shape == theirs.array.shape


def test_ranks_share_states(pools: Pools) -> None:
    alone = results(None)
    for answer in pools("gloo", 2).run(results):
        assert answer["ranks"] == 2
        np.testing.assert_allclose(answer["evs"], alone["evs"], atol=1e-12)
        assert np.array_equal(answer["bits"], alone["bits"])
        assert answer["one"] == alone["one"]


# ---- channels -------------------------------------------------------------------------------------------------------


def channel(qubits: int, seed: int) -> Kraus:
    size = 2**qubits
    drawn = np.random.default_rng(seed).normal(size=(2, 3 * size, size))
    columns, _ = np.linalg.qr(drawn[0] + 1j * drawn[1])
    return Kraus(list(columns.reshape(3, size, size)))


def noisy() -> Any:
    circuit = QuantumCircuit(3)
    circuit.h(0)
    circuit.cx(0, 1)
    circuit.ry(0.4, 2)
    circuit.append(channel(1, seed=0).to_instruction(), [1])
    circuit.append(channel(2, seed=1).to_instruction(), [2, 0])
    circuit.append(SuperOp(channel(1, seed=2)).to_instruction(), [0])
    circuit.rx(0.3, 1)
    return circuit


def test_channels_are_those_of_qiskit() -> None:
    expected = DensityMatrix(noisy()).reverse_qargs().data
    found = uq.DensityState(3).run(uq.from_qiskit(noisy())).matrix().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-12)


def noisy_counts(comm: Any) -> dict[str, int]:
    measured = noisy()
    measured.measure_all()
    return UnisonoSampler(seed=4).run([measured], shots=2000).result()[0].data.meas.get_counts()


def test_shots_of_noisy_circuits_draw_their_channels(pools: Pools) -> None:
    counts = noisy_counts(None)
    probabilities = DensityMatrix(noisy()).probabilities_dict()
    for bits, probability in probabilities.items():
        assert abs(counts.get(bits, 0) - 2000 * probability) < 5 * np.sqrt(2000 * probability), bits
    assert pools("gloo", 2).run(noisy_counts) == [counts, counts]


def test_a_time_evolution_is_its_synthesis() -> None:
    """As transpiled circuits have it; Statevector takes the exponential of the sum instead."""
    circuit = QuantumCircuit(2)
    circuit.append(ql.PauliEvolutionGate(SparsePauliOp(["XX", "ZI"]), 0.3), [0, 1])
    found = uq.simulate(uq.from_qiskit(circuit)).amplitudes().numpy()
    np.testing.assert_allclose(found, Statevector(circuit.decompose(reps=3)).reverse_qargs().data, atol=1e-12)


# ---- backend --------------------------------------------------------------------------------------------------------


def test_backend() -> None:
    backend = UnisonoBackend(seed=2)
    circuit = QuantumCircuit(3, 3)
    circuit.append(ql.QFTGate(3), range(3))
    circuit.append(ql.QFTGate(3).inverse(), range(3))
    circuit.x(1)
    circuit.measure(range(3), range(3))
    job = backend.run(transpile(circuit, backend), shots=100, memory=True)
    assert job.result().get_counts() == {"010": 100}
    assert job.result().get_memory() == ["010"] * 100
    assert job.status().name == "DONE"
    assert backend.run([one_qubit(), circuit], shots=10, seed_simulator=4).result().get_counts(1) == {"010": 10}
    sampler = BackendSamplerV2(backend=backend)
    assert sampler.run([circuit], shots=10).result()[0].data.c.get_counts() == {"010": 10}
    two = QuantumCircuit(QuantumRegister(2), ClassicalRegister(1, "a"), ClassicalRegister(1, "b"))
    two.x(1)
    two.measure([0, 1], [0, 1])
    assert backend.run(two, shots=5).result().get_counts() == {"1 0": 5}


def while_loop() -> Any:
    circuit = QuantumCircuit(1, 1)
    with circuit.while_loop((circuit.clbits[0], 0)):
        circuit.h(0)
        circuit.measure(0, 0)
    return circuit


def asks_what_it_writes() -> Any:
    circuit = QuantumCircuit(1, 1)
    with circuit.if_test((circuit.clbits[0], 0)):
        circuit.measure(0, 0)
    return circuit


def parametric(power: int = 1) -> Any:
    circuit = QuantumCircuit(1)
    circuit.rx(Parameter("a") ** power, 0)
    return circuit


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: uq.from_qiskit(uq.Circuit(2)), "expected a qiskit.QuantumCircuit"),
    (lambda: uq.from_qiskit(QuantumCircuit()), "without qubits"),
    (lambda: uq.from_qiskit(parametric(2)), "affine in the circuit's parameters; assign 'a' a number first"),
    (lambda: uq.from_qiskit(parametric(), features=["b"]), "'b' is no parameter of the circuit"),
    (lambda: uq.from_qiskit(while_loop()), "while_loop"),
    (lambda: uq.from_qiskit(asks_what_it_writes()), "measures into the bits that it asks for"),
    (lambda: UnisonoEstimator().run([(one_qubit(), "Z")]), "expected a unitary circuit"),
    (lambda: UnisonoEstimator().run([(noisy(), "ZZZ")]), "or has channels: expected a unitary circuit"),
    (lambda: UnisonoBackend().run(parametric()), "with the parameters a: assign_parameters first"),
    (lambda: UnisonoBackend().run("circuit"), "expected a qiskit.QuantumCircuit"),
    (lambda: UnisonoBackend().run(3), r"run of 3 \(int\): expected a qiskit.QuantumCircuit"),
    (lambda: UnisonoBackend().run(one_qubit(), shot=4), "option 'shot'"),
    (lambda: UnisonoSampler(ranks=2), "ranks=2 in a job of 1"),
    (lambda: UnisonoSampler(dtype=torch.float32), "expected torch.complex64"),
    (lambda: UnisonoSampler(seed="x"), "seed='x'"),
    (lambda: UnisonoSampler().run([one_qubit()], shots=-1), "-1 shots"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
