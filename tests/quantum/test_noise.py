"""Circuits with noise: density matrices and trajectories against default.mixed and a dense reference, on ranks too."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum import dense
from tests.quantum.circuits import NAMES, random_circuit, random_unitary
from tests.ranks import RankPool
from unisono import quantum as uq
from unisono.errors import UsageError
from unisono.quantum import shots as shots_module
from unisono.quantum.circuit.channels import Channel
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import GATES, pauli_rotation
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Affine
from unisono.quantum.noise.doubled import conjugate

Pools = Callable[[str, int], RankPool]
N = 4
WORDS = ["Z0", "X1 Y2", "Y0 Z1 X3", "Y3", "X0 X1 X2 X3", "Y1 Y2"]
WIRES = [(0,), (3, 1), (2, 0, 3), (0, 1, 2, 3)]


def random_kraus(draw: np.random.Generator, wires: int, count: int) -> list[np.ndarray]:
    """The blocks of an isometry."""
    size = 2**wires
    return list(random_unitary(draw, count * size)[:, :size].reshape(count, size, size))


def channels() -> list[Channel]:
    draw = np.random.default_rng(3)
    return [
        uq.depolarizing(0.2),
        uq.depolarizing(0.3, wires=2),
        uq.amplitude_damping(0.4),
        uq.amplitude_damping(0.3, excited=0.2),
        uq.phase_damping(0.5),
        uq.bit_flip(0.15),
        uq.phase_flip(0.25),
        uq.pauli_channel({"X": 0.1, "Y": 0.2, "Z": 0.05}),
        uq.pauli_channel({"XY": 0.1, "IZ": 0.2}),
        uq.kraus(random_kraus(draw, 1, 3)),
        uq.kraus(random_kraus(draw, 2, 4)),
    ]


def noisy_circuit(seed: int, gates: int = 24, n: int = N) -> Circuit:
    """Random gates of every kind with channels between them; reads two weights."""
    draw = np.random.default_rng(seed)
    circuit = Circuit(n)
    for each in random_circuit(n, gates, seed, weights=2, controls=1).operations:
        circuit.append(each)
        channel = channels()[int(draw.integers(len(channels())))]
        if draw.random() < 0.6:
            circuit.channel(channel, [int(wire) for wire in draw.permutation(n)[: channel.targets]])
    return circuit.rx(0, uq.weight(0)).ry(1, uq.weight(1))


WEIGHTS = (0.3, -0.8)


def dense_density(circuit: Circuit, weights: tuple[float, ...] = WEIGHTS) -> np.ndarray:
    n = circuit.wires
    rho = np.zeros((2**n, 2**n), dtype=complex)
    rho[0, 0] = 1
    for each in circuit.operations:
        if isinstance(each.gate, Channel):
            expanded = [dense.expanded(matrix, each.targets, n) for matrix in each.gate.operators]
        elif each.name == "measure":
            expanded = [dense.expanded(dense.PROJECTOR[bit], each.targets, n) for bit in (0, 1)]
        elif each.name == "reset":
            expanded = [dense.expanded(np.eye(2)[:, [0]] @ np.eye(2)[[bit]], each.targets, n) for bit in (0, 1)]
        else:
            expanded = [dense.operator(each, each.angles(weights), n)]
        rho = sum(matrix @ rho @ matrix.conj().T for matrix in expanded)
    return rho


# ---- channels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "XYZ", "YY", "Z", "unitary", "diagonal"])
def test_conjugates_of_gates(name: str) -> None:
    draw = np.random.default_rng(1)
    if name in GATES:
        kind = GATES[name]
    elif name in ("unitary", "diagonal"):
        matrix = random_unitary(draw, 4)
        operations = getattr(Circuit(2), name)(matrix if name == "unitary" else np.exp(1j * np.arange(4)), (0, 1))
        kind = operations.operations[0].gate
    else:
        kind = pauli_rotation(name)
    angles = draw.uniform(-3, 3, kind.parameters)
    made = Operation(kind, tuple(range(kind.targets)), (), tuple(Affine(float(angle)) for angle in angles))
    other = conjugate(made)
    np.testing.assert_allclose(other.matrix(other.angles()), made.matrix(made.angles()).conj(), atol=1e-15)


def test_channels_keep_their_kraus_operators() -> None:
    for channel in channels():
        total = sum(each.conj().T @ each for each in channel.operators)
        np.testing.assert_allclose(total, np.eye(2**channel.targets), atol=1e-14)
        assert pickle.loads(pickle.dumps(channel)) == channel
        assert len({channel, pickle.loads(pickle.dumps(channel))}) == 1
    assert uq.depolarizing(0.2).probabilities == pytest.approx((0.8, 0.2 / 3, 0.2 / 3, 0.2 / 3))
    assert uq.amplitude_damping(0.2).probabilities is None
    nearly = [np.sqrt(0.5) * np.eye(2), np.round(np.sqrt(0.5), 7) * np.array([[0, 1], [1, 0]])]
    total = sum(each.conj().T @ each for each in uq.kraus(nearly).operators)
    np.testing.assert_allclose(total, np.eye(2), atol=1e-15)


def test_drawing_and_counts() -> None:
    circuit = Circuit(2).h(0).depolarizing((0, 1), 0.1).amplitude_damping(1, 0.25)
    assert "DEPOL(0.1):0" in circuit.draw()
    assert "AD(0.25)" in circuit.draw()
    assert "AD(0.25)" in circuit.draw("svg")
    assert circuit.counts() == {"h": 1, "depolarizing": 1, "amplitude_damping": 1}
    assert not circuit.is_unitary
    noisy = uq.with_noise(
        Circuit(2).h(0).cnot(0, 1).measure_all(), {1: uq.bit_flip(0.1), "cx": uq.depolarizing(0.1, 2)}
    )
    assert noisy.counts() == {"h": 1, "bit_flip": 1, "cx": 1, "depolarizing": 1, "measure": 2}
    each = uq.with_noise(Circuit(2).cnot(0, 1), {2: [uq.phase_damping(0.1), uq.depolarizing(0.1, 2)]})
    assert each.counts() == {"cx": 1, "phase_damping": 2, "depolarizing": 1}


# ---- density matrices -----------------------------------------------------------------------------------------------


def read_density(comm: Any, seed: int) -> dict[str, Any]:
    rho = uq.DensityState(N, comm, chunk=1024).run(noisy_circuit(seed), WEIGHTS)
    pure = uq.simulate(random_circuit(N, 10, 3))
    found = {
        "matrix": rho.matrix().numpy(),
        "expectations": rho.expectations([*WORDS, uq.Projector("10", (2, 0)) - 0.5 * uq.X(3)]).numpy(),
        "probabilities": [rho.probabilities(wires).numpy() for wires in WIRES],
        "reduced": [rho.partial_trace(wires).numpy() for wires in WIRES],
        "purity": rho.purity(),
        "trace": rho.trace(),
        "fidelity": rho.fidelity(pure.amplitudes()),
        "samples": rho.samples(200, seed=5, wires=(3, 0, 1), readout={0: 0.1, 3: (0.2, 0.05)}).numpy(),
    }
    found["again"] = rho.run(noisy_circuit(seed + 1, 8), WEIGHTS).matrix().numpy()
    return found


def reduced(rho: np.ndarray, wires: tuple[int, ...]) -> np.ndarray:
    n = len(rho).bit_length() - 1
    rest = [wire for wire in range(n) if wire not in wires]
    order = [*wires, *rest]
    full = rho.reshape((2,) * (2 * n)).transpose(order + [n + wire for wire in order])
    return np.einsum("arbr->ab", full.reshape(2 ** len(wires), 2 ** len(rest), 2 ** len(wires), 2 ** len(rest)))


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize(("size", "seed"), [(1, 0), (1, 1), (2, 0), (2, 1), (4, 2)])
def test_density_equals_the_dense_reference(pools: Pools, size: int, seed: int) -> None:
    rho = dense_density(noisy_circuit(seed))
    vector = dense.state(random_circuit(N, 10, 3))
    alone = read_density(None, seed)
    for answer in pools("gloo", size).run(read_density, seed) if size > 1 else [alone]:
        np.testing.assert_allclose(answer["matrix"], rho, atol=1e-12)
        for value, word in zip(answer["expectations"], [*WORDS, None], strict=True):
            given = uq.Projector("10", (2, 0)) - 0.5 * uq.X(3) if word is None else uq.PauliSum() + word
            expected = np.trace(dense.observable_matrix(given, N) @ rho).real
            assert value == pytest.approx(expected, abs=1e-12)
        for wires, table, matrix in zip(WIRES, answer["probabilities"], answer["reduced"], strict=True):
            np.testing.assert_allclose(matrix, reduced(rho, wires), atol=1e-12)
            np.testing.assert_allclose(table, np.diagonal(reduced(rho, wires)).real, atol=1e-12)
        assert answer["purity"] == pytest.approx(np.trace(rho @ rho).real, abs=1e-12)
        assert answer["trace"] == pytest.approx(1, abs=1e-12)
        assert answer["fidelity"] == pytest.approx(np.vdot(vector, rho @ vector).real, abs=1e-12)
        assert np.array_equal(answer["samples"], alone["samples"])
        np.testing.assert_allclose(answer["again"], alone["again"], atol=1e-12)


def test_density_equals_default_mixed() -> None:
    qml = pytest.importorskip("pennylane", reason="pennylane is not installed")
    draw = np.random.default_rng(8)
    operators = random_kraus(draw, 2, 3)
    rounds = [(draw.uniform(-3, 3, size=(3, 3)), draw.uniform(0, 0.5, size=6)) for _ in range(4)]

    @qml.qnode(qml.device("default.mixed", wires=3))
    def theirs() -> Any:
        for angles, strengths in rounds:
            for wire in range(3):
                qml.Rot(*angles[wire], wires=wire)
            qml.CNOT((0, 1))
            qml.DepolarizingChannel(strengths[0], wires=0)
            qml.AmplitudeDamping(strengths[1], wires=1)
            qml.PhaseDamping(strengths[2], wires=2)
            qml.CRX(strengths[0], wires=(2, 0))
            qml.BitFlip(strengths[3], wires=2)
            qml.PhaseFlip(strengths[4], wires=0)
            qml.GeneralizedAmplitudeDamping(strengths[5], 0.7, wires=1)
            qml.QubitChannel(operators, wires=(1, 2))
        return qml.density_matrix(wires=range(3))

    circuit = Circuit(3)
    for angles, strengths in rounds:
        for wire in range(3):
            circuit.rot(wire, *angles[wire])
        circuit.cnot(0, 1).depolarizing(0, strengths[0]).amplitude_damping(1, strengths[1])
        circuit.phase_damping(2, strengths[2]).crx(2, 0, strengths[0]).bit_flip(2, strengths[3])
        circuit.phase_flip(0, strengths[4]).amplitude_damping(1, strengths[5], excited=0.7).kraus(operators, (1, 2))
    np.testing.assert_allclose(uq.DensityState(3).run(circuit).matrix().numpy(), theirs(), atol=1e-10)


def test_density_of_measurements_and_resets() -> None:
    circuit = Circuit(3).h(0).cnot(0, 1).ry(2, 0.7).measure(0).cnot(1, 2).reset(1).h(1).cnot(1, 0)
    for dtype, atol in ((torch.complex128, 1e-12), (torch.complex64, 1e-6)):
        rho = uq.DensityState(3, dtype=dtype).run(circuit)
        np.testing.assert_allclose(rho.matrix().numpy(), dense_density(circuit, ()), atol=atol)


def test_density_begins_with_a_matrix() -> None:
    start = dense_density(noisy_circuit(4, 10))
    rho = uq.DensityState(N).set_matrix(start).run(Circuit(N).h(0).cnot(0, 3))
    matrix = dense.unitary(Circuit(N).h(0).cnot(0, 3))
    np.testing.assert_allclose(rho.matrix().numpy(), matrix @ start @ matrix.conj().T, atol=1e-12)
    assert uq.DensityState(N).purity() == 1.0


def test_samples_follow_the_probabilities_and_readout_errors() -> None:
    rho = uq.DensityState(N).run(noisy_circuit(6), WEIGHTS)
    shots, readout = 40_000, {0: 0.1, 2: (0.3, 0.05)}
    table = rho.probabilities((2, 0), readout=readout).numpy()
    flip = np.kron([[0.7, 0.05], [0.3, 0.95]], [[0.9, 0.1], [0.1, 0.9]])
    np.testing.assert_allclose(table, flip @ rho.probabilities((2, 0)).numpy(), atol=1e-14)
    read = rho.samples(shots, seed=1, wires=(2, 0), readout=readout).numpy()
    found = np.bincount(read @ [2, 1], minlength=4)
    assert np.all(np.abs(found - shots * table) < 5 * np.sqrt(shots * table * (1 - table)))
    assert torch.equal(rho.samples(20, seed=3), rho.samples(20, seed=3))


# ---- trajectories ---------------------------------------------------------------------------------------------------


def read_trajectories(comm: Any, ranks_per_state: int) -> tuple[np.ndarray, np.ndarray]:
    circuit = noisy_circuit(2, 10)
    found = uq.trajectories(
        circuit, 60, WORDS, weights=WEIGHTS, comm=comm, seed=4, ranks_per_state=ranks_per_state
    ).values.numpy()
    bits = uq.measured(
        noisy_bits(), 40, comm=comm, seed=2, ranks_per_state=None if comm is None else ranks_per_state, readout=0.1
    )
    return found, bits.numpy()


def noisy_bits() -> Circuit:
    circuit = Circuit(3).h(0).depolarizing(0, 0.3).cnot(0, 1).amplitude_damping(1, 0.4).measure(1, 0)
    return circuit.apply("x", 2, condition={0: 1}).phase_damping(2, 0.2).bit_flip(2, 0.2).measure(2, 1)


@pytest.mark.usefixtures("compiled_kernels")
def test_trajectories_do_not_depend_on_the_number_of_ranks(pools: Pools) -> None:
    values, bits = read_trajectories(None, 1)
    for size, ranks_per_state in ((2, 1), (2, 2), (4, 2)):
        for answer, read in pools("gloo", size).run(read_trajectories, ranks_per_state):
            np.testing.assert_allclose(answer, values, atol=1e-12)
            assert np.array_equal(read, bits)


def test_trajectories_average_to_the_density_matrix() -> None:
    circuit = noisy_circuit(5, 12)
    exact = uq.DensityState(N).run(circuit, WEIGHTS).expectations(WORDS)
    found = uq.trajectories(circuit, 1000, WORDS, weights=WEIGHTS, seed=1)
    assert torch.all((found.mean - exact).abs() < 4.5 * found.error + 1e-12)
    assert torch.all(found.error < 0.04)
    assert "1000" in repr(found)


def test_trajectories_together_are_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    values, bits = read_trajectories(None, 1)
    final = uq.with_noise(Circuit(3).h(0).cnot(0, 1).cnot(1, 2), {2: uq.depolarizing(0.2, 2)}).measure_all()
    read = uq.measured(final, 30, seed=6, readout=0.05)
    monkeypatch.setattr(shots_module, "_AT_ONCE", 0)
    again, again_bits = read_trajectories(None, 1)
    assert np.array_equal(values, again)
    assert np.array_equal(bits, again_bits)
    assert torch.equal(uq.measured(final, 30, seed=6, readout=0.05), read)


@pytest.mark.parametrize("readout", [None, (0.05, 0.2)])
def test_noisy_shots_follow_the_density_matrix(readout: Any) -> None:
    noise = {1: uq.amplitude_damping(0.2), 2: uq.depolarizing(0.1, 2)}
    plain = uq.with_noise(Circuit(3).h(0).cnot(0, 1).ry(2, 1.1).cnot(1, 2), noise)
    table = uq.DensityState(3).run(plain).probabilities(readout=readout).numpy()
    shots = 3000
    read = uq.measured(plain.copy().measure_all(), shots, seed=3, readout=readout).numpy()
    found = np.bincount(read @ [4, 2, 1], minlength=8)
    assert np.all(np.abs(found - shots * table) < 5 * np.sqrt(shots * table * (1 - table)) + 1e-9)


def test_conditions_see_what_was_read() -> None:
    circuit = Circuit(2).measure(0, 0).apply("x", 1, condition={0: 1}).measure(1, 1)
    read = uq.measured(circuit, 400, seed=1, readout={0: 0.3}).numpy()
    assert np.array_equal(read[:, 0], read[:, 1])
    assert 80 < read[:, 0].sum() < 160


def test_a_state_takes_one_trajectory() -> None:
    circuit = Circuit(3).h(0).cnot(0, 1).amplitude_damping(1, 0.5).bit_flip(2, 0.5)
    found = [uq.simulate(circuit, seed=seed) for seed in range(8)]
    assert all(state.norm() == pytest.approx(1) for state in found)
    assert len({tuple(np.round(uq.probabilities(state).tolist(), 9)) for state in found}) > 2


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: uq.depolarizing(1.5), "depolarizing: probability 1.5, expected a number of 0 to 1"),
    (lambda: Circuit(2).bit_flip(0, "a"), "bit_flip: probability 'a'"),
    (lambda: uq.depolarizing(0.1, wires=9), "on 9 wires: expected 1 to 4"),
    (lambda: uq.kraus([np.eye(2), np.eye(2)]), "not complete: the sum of K\\^\\+ K differs from the identity by 1"),
    (lambda: uq.kraus([np.eye(3)]), "shape \\(3, 3\\): expected"),
    (lambda: uq.kraus([]), "shape none"),
    (lambda: uq.kraus([np.eye(2), np.eye(4)]), "alike"),
    (lambda: uq.kraus([["a"]]), "expected a list of matrices"),
    (lambda: uq.pauli_channel({"X": 0.7, "Z": 0.5}), "sum to 1.2"),
    (lambda: uq.pauli_channel({"X": 0.1, "ZZ": 0.1}), "all of one length"),
    (lambda: uq.pauli_channel({}), "expected probabilities of Pauli strings"),
    (lambda: Circuit(2).channel("depolarizing", 0), "expected a Channel"),
    (lambda: Circuit(2).channel(uq.depolarizing(0.1, 2), 0), "acts on 2 wires, but got 1"),
    (lambda: Circuit(2).depolarizing(5, 0.1), "wires 0 to 1"),
    (lambda: Circuit(2).bit_flip(0, 0.1).inverse(), "bit_flip has no inverse"),
    (lambda: Circuit(2).apply(uq.bit_flip(0.1), 0, controls=[1]), "cannot be controlled"),
    (lambda: Circuit(2).bit_flip(0, 0.1).to_qasm(), "OpenQASM has no channels"),
    (lambda: uq.Layer(noisy_bits(), [uq.Z(0)]), "a density matrix has no bits"),
    (lambda: uq.Layer(Circuit(13).bit_flip(0, 0.1), [uq.Z(0)]), "at most 12 wires without shots"),
    (lambda: uq.Layer(Circuit(2).bit_flip(0, 0.1), output="state"), "has channels or measurements"),
    (lambda: uq.DensityState(0), "DensityState\\(0\\)"),
    (lambda: uq.DensityState(2).run(Circuit(3)), "a circuit of 3 wires"),
    (lambda: uq.DensityState(2).run(noisy_bits().copy()), "a circuit of 3 wires for a density matrix of 2"),
    (lambda: uq.DensityState(3).run(noisy_bits()), "depends on a measured bit"),
    (lambda: uq.DensityState(1).set_matrix(np.eye(2)), "trace 2"),
    (lambda: uq.DensityState(1).set_matrix([[1, 0]]), "expected \\(2, 2\\)"),
    (lambda: uq.DensityState(1).probabilities(readout=2), "readout error 2"),
    (lambda: uq.DensityState(1).probabilities(readout={3: 0.1}), "wires of 0 to 0"),
    (lambda: uq.DensityState(2).probabilities((0, 0)), "different wires"),
    (lambda: uq.DensityState(2).fidelity(torch.ones(4)), "norm 2"),
    (lambda: uq.trajectories(Circuit(1).bit_flip(0, 0.1), 1, ["Z0"]), "count=1"),
    (lambda: uq.trajectories(Circuit(1).bit_flip(0, 0.1), 5, ["Z3"]), "wires 0 to 0"),
    (lambda: uq.measured(Circuit(1).measure(0), 5, ranks_per_state=2), "ranks_per_state=2 of 1 ranks"),
    (lambda: uq.with_noise(Circuit(1), {"x": 0.1}), "a Channel"),
    (lambda: uq.with_noise(Circuit(1).x(0), {"x": uq.depolarizing(0.1, 2)}), "acts on 2 wires"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
