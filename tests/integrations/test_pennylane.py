"""The PennyLane device unisono.qubit: results, derivatives and samples are those of default.qubit."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import RankPool
from unisono.errors import UsageError

qml = pytest.importorskip("pennylane", reason="pennylane is not installed")
pytest.importorskip("numba", reason="numba is not installed")
from pennylane import numpy as pnp  # noqa: E402
from pennylane.exceptions import DeviceError  # noqa: E402

from unisono.integrations.pennylane import UnisonoQubit  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_kernels")


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """The CPU kernels, compiled once and kept on disk, so that ranks need not all compile them at once."""
    qml.grad(qml.QNode(ansatz, UnisonoQubit(4), diff_method="adjoint"))(angles())


def angles(layers: int = 2, wires: int = 4) -> Any:
    shape = qml.StronglyEntanglingLayers.shape(layers, wires)
    return pnp.array(np.random.default_rng(7).uniform(0, 6, shape), requires_grad=True)


def ansatz(x: Any) -> Any:
    qml.StronglyEntanglingLayers(x, wires=range(4))
    return qml.expval(qml.Z(0) @ qml.X(1) + 0.3 * qml.Y(2))


def entry_point() -> dict[str, str]:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    return tomllib.loads(text)["project"]["entry-points"]["pennylane.plugins"]


def test_the_entry_point_is_the_device() -> None:
    module, _, name = entry_point()["unisono.qubit"].partition(":")
    assert (module, name) == ("unisono.integrations.pennylane", "UnisonoQubit")
    assert UnisonoQubit(2).name == "unisono.qubit"


# ---- analytic -------------------------------------------------------------------------------------------------------


def same(function: Callable[..., Any], *args: Any, wires: Any = 4, atol: float = 1e-10) -> None:
    """The QNode's results on unisono.qubit and on default.qubit, in value and shape."""
    ours = qml.QNode(function, UnisonoQubit(wires))(*args)
    theirs = qml.QNode(function, qml.device("default.qubit", wires=wires))(*args)
    ours, theirs = (each if isinstance(each, tuple | list) else (each,) for each in (ours, theirs))
    for found, expected in zip(ours, theirs, strict=True):
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_allclose(found, expected, atol=atol)


def every_gate() -> None:
    for wire in range(4):
        qml.RY(0.3 + wire, wires=wire)
    qml.SX(0), qml.T(1), qml.S(2), qml.adjoint(qml.S(3)), qml.adjoint(qml.ISWAP)(wires=[0, 2])
    qml.PhaseShift(0.2, 0), qml.U2(0.1, 0.4, 1), qml.U3(0.3, 0.2, 0.9, 2), qml.Rot(0.5, 0.1, 0.2, 3)
    qml.CRot(0.4, 0.6, 0.1, wires=[3, 0]), qml.ControlledPhaseShift(0.7, wires=[1, 2]), qml.CH(wires=[2, 3])
    qml.IsingXX(0.2, wires=[0, 3]), qml.IsingXY(0.5, wires=[1, 2]), qml.PSWAP(0.3, wires=[2, 0])
    (
        qml.PauliRot(0.8, "XIYZ", wires=[3, 1, 0, 2]),
        qml.PauliRot(0.3, "II", wires=[0, 1]),
        qml.MultiRZ(0.4, wires=[0, 2, 3]),
    )
    qml.MultiControlledX(wires=[3, 1, 0], control_values=[0, 1]), qml.GlobalPhase(0.3)
    qml.ctrl(qml.RX, control=[0, 2], control_values=[0, 1])(0.9, wires=1)
    qml.ctrl(qml.GlobalPhase(0.7), control=1), qml.ctrl(qml.adjoint(qml.T(2)), control=0)
    qml.QubitUnitary(qml.QFT.compute_matrix(2), wires=[2, 0]), qml.DiagonalQubitUnitary([1, 1j, -1, 1], wires=[3, 1])
    qml.ctrl(qml.QubitUnitary(qml.Hadamard.compute_matrix(), 1), control=3)
    qml.SingleExcitation(0.4, wires=[0, 1]), qml.DoubleExcitation(0.6, wires=[0, 1, 2, 3]), qml.ECR(wires=[1, 3])
    qml.BlockEncode([[0.1, 0.2], [0.3, 0.4]], wires=[0, 1]), qml.Barrier(wires=[0, 1]), qml.Identity(2)


def test_every_gate() -> None:
    def circuit() -> Any:
        every_gate()
        return qml.state()

    same(circuit)


HERMITIAN = np.array([[1.0, 0.5 - 0.2j], [0.5 + 0.2j, -0.3]])


def test_every_measurement() -> None:
    def circuit(x: Any) -> Any:
        qml.StronglyEntanglingLayers(x, wires=range(4))
        wide = qml.Hamiltonian([0.2, -0.7, 0.4], [qml.Z(0) @ qml.Z(3), qml.X(1), qml.Identity(2)])
        return (
            qml.expval(wide),
            qml.var(wide),
            qml.expval(qml.Hermitian(HERMITIAN, 2) @ qml.Z(0)),
            qml.var(qml.Hermitian(HERMITIAN, 3)),
            qml.expval(qml.Projector([1, 0], wires=[2, 1])),
            qml.expval(qml.Projector([0.6, 0.8j], wires=[2])),
            qml.expval(qml.Hadamard(1) + 2 * qml.Hermitian(HERMITIAN, 1)),
            qml.expval(qml.SparseHamiltonian(wide.sparse_matrix(range(4)), wires=range(4))),
            qml.probs(wires=[2, 0]),
            qml.probs(op=qml.X(1)),
            qml.density_matrix([3, 1]),
            qml.purity([0, 1]),
            qml.vn_entropy([2]),
            qml.mutual_info([0], [1, 2]),
            qml.state(),
        )

    same(circuit, angles())


@pytest.mark.parametrize("wires", [None, ["b", "a", 7, -1]], ids=["none", "labels"])
def test_wires(wires: Any) -> None:
    def circuit() -> Any:
        names = wires or [3, 9, 1, 4]
        qml.BasisState([1, 0, 1], wires=names[:3])
        qml.QFT(wires=names[::-1])
        qml.RX(0.4, wires=names[1])
        return qml.expval(qml.X(names[3])), qml.probs(wires=names[1:3]), qml.probs(op=qml.Y(names[0]))

    same(circuit, wires=wires)


def test_state_preparation() -> None:
    vector = np.random.default_rng(3).normal(size=8) + 0.2j
    vector /= np.linalg.norm(vector)

    def circuit() -> Any:
        qml.StatePrep(vector, wires=[2, 0, 3])
        qml.GroverOperator(wires=range(4))
        qml.StatePrep(vector[:2] / np.linalg.norm(vector[:2]), wires=[1])
        return qml.state()

    same(circuit)


def test_templates() -> None:
    def circuit(x: Any) -> Any:
        qml.AngleEmbedding(x[:4], wires=range(4), rotation="Y")
        qml.SimplifiedTwoDesign(x[:4], x[:12].reshape(2, 3, 2), wires=range(4))
        qml.ApproxTimeEvolution(qml.X(0) @ qml.X(1) + 0.4 * qml.Z(2), 0.7, 2)
        qml.BasicEntanglerLayers(x[:8].reshape(2, 4), wires=range(4))
        qml.QuantumPhaseEstimation(qml.RZ(0.3, wires=0), estimation_wires=[1, 2, 3])
        return qml.probs(wires=range(4))

    same(circuit, angles().reshape(-1))


def test_mid_circuit_measurements_are_deferred() -> None:
    def circuit(x: float) -> Any:
        qml.RX(x, wires=0)
        read = qml.measure(0, reset=True)
        qml.cond(read, qml.RY)(0.7, wires=1)
        return qml.expval(qml.Z(1)), qml.probs(op=read), qml.expval(qml.Z(0))

    same(circuit, 0.9, wires=None)


def test_broadcasting() -> None:
    x = np.linspace(0, 2, 5)

    def circuit(x: Any) -> Any:
        qml.RX(x, wires=0)
        qml.CNOT(wires=[0, 1])
        qml.Rot(0.2, x, 0.1, wires=1)
        return qml.expval(qml.Z(0) @ qml.X(1)), qml.probs(wires=[1])

    same(circuit, x)
    device = UnisonoQubit(2)
    qml.QNode(circuit, device)(x)
    assert len(device._simulator._programs) == 1  # one structure, whatever the angles


def test_single_precision() -> None:
    found = qml.QNode(ansatz, UnisonoQubit(4, c_dtype=np.complex64))(angles())
    assert abs(found - qml.QNode(ansatz, qml.device("default.qubit"))(angles())) < 1e-5


# ---- derivatives ----------------------------------------------------------------------------------------------------


def several(x: Any) -> Any:
    qml.StronglyEntanglingLayers(x, wires=range(4))
    qml.DoubleExcitation(x[0, 0, 0], wires=range(4))
    qml.ctrl(qml.Rot, control=2)(*x[0, 1], wires=0)
    qml.adjoint(qml.U3)(*x[1, 1], wires=3)
    qml.GlobalPhase(x[0, 2, 0])
    qml.QubitUnitary(qml.Hadamard.compute_matrix(), wires=1)
    return (
        qml.expval(qml.Z(0)),
        qml.expval(qml.X(1) @ qml.Y(3) + 0.5 * qml.Hermitian(HERMITIAN, 2)),
        qml.expval(qml.Projector([0, 1], wires=[0, 3])),
    )


def jacobian(device: Any, **options: Any) -> np.ndarray:
    node = qml.QNode(several, device, **options)
    return qml.jacobian(lambda x: pnp.stack(node(x)))(angles())


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # default.qubit's backpropagation
@pytest.mark.parametrize(
    "options",
    [{"diff_method": "adjoint"}, {"diff_method": "adjoint", "device_vjp": True}, {"diff_method": "best"}],
    ids=["adjoint", "vjp", "best"],
)
def test_jacobians(options: dict[str, Any]) -> None:
    expected = jacobian(qml.device("default.qubit"), diff_method="backprop")
    np.testing.assert_allclose(jacobian(UnisonoQubit(4), **options), expected, atol=1e-10)


def test_second_derivatives_are_not_by_the_adjoint_method() -> None:
    """PennyLane found its gradients to be constant: zero, with a warning."""

    def cosine(x: Any) -> Any:
        qml.RX(x, wires=0)
        return qml.expval(qml.Z(0))

    device, x = qml.device("unisono.qubit", wires=1), pnp.array(0.3, requires_grad=True)
    second = qml.jacobian(qml.jacobian(qml.QNode(cosine, device, max_diff=2)))
    assert second(x) == pytest.approx(-np.cos(0.3))
    with pytest.raises(qml.exceptions.QuantumFunctionError, match="does not support adjoint"):
        qml.QNode(cosine, device, diff_method="adjoint", max_diff=2)(x)


def test_parameter_shift() -> None:
    def gradient(device: Any, **options: Any) -> np.ndarray:
        return qml.grad(qml.QNode(ansatz, device, **options))(angles(1))

    expected = gradient(qml.device("default.qubit"), diff_method="backprop")
    np.testing.assert_allclose(gradient(UnisonoQubit(4), diff_method="parameter-shift"), expected, atol=1e-10)


def test_torch() -> None:
    x = torch.tensor(np.array(angles()), requires_grad=True)
    results = []
    for device in (UnisonoQubit(4), qml.device("default.qubit")):
        values = torch.stack(qml.QNode(several, device, interface="torch")(x))
        (values * torch.tensor([1.0, -2.0, 0.5])).sum().backward()
        assert x.grad is not None
        results.append((values.detach().numpy(), x.grad.clone().numpy()))
        x.grad = None
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.fixture
def jax() -> Iterator[Any]:
    """In double precision, which jax has to be told."""
    module = pytest.importorskip("jax", reason="jax is not installed")
    module.config.update("jax_enable_x64", True)
    yield module
    module.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("device_vjp", [False, True])
def test_jax(jax: Any, device_vjp: bool) -> None:
    x = jax.numpy.array(np.array(angles()))
    node = qml.QNode(several, UnisonoQubit(4), interface="jax", diff_method="adjoint", device_vjp=device_vjp)
    reference = qml.QNode(several, qml.device("default.qubit"), interface="jax", diff_method="backprop")

    def cost(node: Any) -> Callable[[Any], Any]:
        return lambda x: jax.numpy.stack(node(x)) @ jax.numpy.array([1.0, -2.0, 0.5])

    np.testing.assert_allclose(jax.numpy.stack(node(x)), jax.numpy.stack(reference(x)), atol=1e-10)
    expected = jax.grad(cost(reference))(x)
    np.testing.assert_allclose(jax.grad(cost(node))(x), expected, atol=1e-10)
    np.testing.assert_allclose(jax.jit(jax.grad(cost(node)))(x), expected, atol=1e-10)
    np.testing.assert_allclose(
        jax.jacrev(lambda x: jax.numpy.stack(node(x)))(x),
        jax.jacrev(lambda x: jax.numpy.stack(reference(x)))(x),
        atol=1e-10,
    )


def test_products_with_a_jacobian() -> None:
    """What jax calls: the device's own methods, against its Jacobian and default.qubit's."""
    operators = [qml.RX(0.3, 0), qml.CNOT([0, 1]), qml.RY(0.8, 1)]
    tape = qml.tape.QuantumScript(operators, [qml.expval(qml.Z(1)), qml.expval(qml.X(1))])
    config = qml.devices.ExecutionConfig(gradient_method="adjoint")
    for ours, theirs in zip(
        UnisonoQubit(2).execute_and_compute_jvp(tape, (0.5, -2.0), config),
        qml.device("default.qubit").execute_and_compute_jvp(tape, (0.5, -2.0), config),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    batched = UnisonoQubit(2).compute_vjp(tape, (np.eye(2)[0], np.eye(2)[1]), config)
    np.testing.assert_allclose(np.transpose(batched), UnisonoQubit(2).compute_derivatives(tape, config), atol=1e-12)
    values, _ = UnisonoQubit(2).execute_and_compute_derivatives(tape, config)
    np.testing.assert_allclose(values, qml.device("default.qubit").execute(tape), atol=1e-12)


def test_trainable_coefficients_by_best() -> None:
    """The adjoint method has no derivatives of observables; `best` takes a method that has them."""

    def energy(device: Any, coefficients: Any, x: Any) -> Any:
        @qml.qnode(device)
        def circuit(coefficients: Any, x: Any) -> Any:
            qml.RX(x, wires=0)
            return qml.expval(qml.dot(coefficients, [qml.Z(0), qml.Y(0)]))

        return circuit(coefficients, x)

    given = (pnp.array([0.3, 0.8], requires_grad=True), pnp.array(0.4, requires_grad=True))
    found = [
        qml.grad(lambda *a, device=device: energy(device, *a))(*given)
        for device in (UnisonoQubit(1), qml.device("default.qubit"))
    ]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)


# ---- as PennyLane's users write it ----------------------------------------------------------------------------------


def test_vqe() -> None:
    """The ground state of H2 in four spin orbitals, from Hartree-Fock by one double excitation."""
    terms = {"Z0": 0.1711, "Z1": 0.1711, "Z2": -0.2227, "Z3": -0.2227, "Z0 Z1": 0.1686, "Z2 Z3": 0.1743}
    terms |= {"Z0 Z2": 0.1205, "Z1 Z3": 0.1205, "Z0 Z3": 0.1659, "Z1 Z2": 0.1659, "Y0 X1 X2 Y3": 0.0453}
    terms |= {"Y0 Y1 X2 X3": -0.0453, "X0 X1 Y2 Y3": -0.0453, "X0 Y1 Y2 X3": 0.0453, "": -0.0996}
    paulis = {"X": qml.X, "Y": qml.Y, "Z": qml.Z}
    words = [
        qml.prod(*[paulis[each[0]](int(each[1])) for each in word.split()]) if word else qml.Identity(0)
        for word in terms
    ]
    molecule = qml.dot(list(terms.values()), words)

    @qml.qnode(UnisonoQubit(4))
    def energy(x: Any) -> Any:
        qml.BasisState([1, 1, 0, 0], wires=range(4))
        qml.DoubleExcitation(x, wires=range(4))
        return qml.expval(molecule)

    x, optimizer = pnp.array(0.0, requires_grad=True), qml.GradientDescentOptimizer(stepsize=0.8)
    for _ in range(25):
        x = optimizer.step(energy, x)
    lowest = np.linalg.eigvalsh(qml.matrix(molecule, wire_order=range(4)))[0]
    assert abs(energy(x) - lowest) < 1e-4


def test_qaoa() -> None:
    """The largest cut of a ring of four: all edges, and the two best readings are the alternating ones."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 0)]
    cost = qml.sum(*[qml.Z(a) @ qml.Z(b) for a, b in edges])
    mixer = qml.sum(*[qml.X(wire) for wire in range(4)])
    device = UnisonoQubit(4)

    def circuit(x: Any) -> None:
        for wire in range(4):
            qml.Hadamard(wire)
        for gamma, alpha in zip(x[0], x[1], strict=True):
            qml.qaoa.cost_layer(gamma, cost)
            qml.qaoa.mixer_layer(alpha, mixer)

    @qml.qnode(device)
    def energy(x: Any) -> Any:
        circuit(x)
        return qml.expval(cost)

    @qml.qnode(device)
    def readings(x: Any) -> Any:
        circuit(x)
        return qml.probs(wires=range(4))

    x = pnp.array([[0.3, 0.5], [-0.4, -0.2]], requires_grad=True)
    optimizer = qml.AdamOptimizer(0.1)
    for _ in range(30):
        x = optimizer.step(energy, x)
    assert energy(x) < -3.9
    assert set(np.argsort(readings(x))[-2:].tolist()) == {0b0101, 0b1010}


# ---- shots ----------------------------------------------------------------------------------------------------------


def sampling(x: Any) -> Any:
    qml.StronglyEntanglingLayers(x, wires=range(4))
    return (
        qml.expval(qml.Z(0) @ qml.X(1) + 0.3 * qml.Y(2)),
        qml.var(qml.X(1)),
        qml.probs(wires=[3, 1]),
        qml.counts(wires=[0]),
        qml.sample(qml.Z(2)),
        qml.expval(qml.Hermitian(HERMITIAN, 2)),
    )


def test_shots_and_their_seed() -> None:
    def run(seed: int) -> Any:
        return qml.set_shots(qml.QNode(sampling, UnisonoQubit(4, seed=seed)), 20000)(angles())

    first, again, other = run(5), run(5), run(6)
    assert first[0] == again[0] != other[0]
    assert first[3] == again[3] != other[3]
    assert np.array_equal(first[4], again[4])
    exact = qml.QNode(ansatz, qml.device("default.qubit"))(angles())
    assert abs(first[0] - exact) < 0.05
    assert sum(first[3].values()) == 20000
    assert abs(first[2].sum() - 1) < 1e-12
    assert first[4].shape == (20000,)


def test_observables_measured_in_several_bases_share_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    device = UnisonoQubit(4, seed=1)
    runs = []
    run = device._simulator._run
    monkeypatch.setattr(device._simulator, "_run", lambda job: runs.append(1) or run(job))
    qml.set_shots(qml.QNode(ansatz, device), 100)(angles())
    assert len(runs) == 1
    assert not device._simulator._states


def test_shot_vectors_and_shadows() -> None:
    def circuit() -> Any:
        qml.Hadamard(0)
        qml.CNOT([0, 1])
        return qml.expval(qml.Z(0) @ qml.Z(1)), qml.sample(wires=[1])

    found = qml.set_shots(qml.QNode(circuit, UnisonoQubit(2, seed=1)), (10, 30))()
    assert [(float(value), np.shape(read)) for value, read in found] == [(1.0, (10, 1)), (1.0, (30, 1))]

    def shadow() -> Any:
        qml.Hadamard(0)
        return qml.classical_shadow(wires=[0, 1])

    assert np.shape(qml.set_shots(qml.QNode(shadow, UnisonoQubit(2, seed=1)), 50)()) == (2, 50, 2)


# ---- ranks ----------------------------------------------------------------------------------------------------------


def on_ranks(comm: Any) -> Any:
    device = UnisonoQubit(4, ranks=comm.size if comm is not None else 1, seed=3)

    def states(x: Any) -> Any:
        qml.StatePrep(np.arange(1, 5) / np.linalg.norm(np.arange(1, 5)), wires=[1, 3])
        qml.StronglyEntanglingLayers(x, wires=range(4))
        return qml.probs(op=qml.X(0)), qml.state(), qml.density_matrix([2]), qml.var(qml.X(0) @ qml.Y(3))

    def narrow() -> Any:
        qml.QubitUnitary(qml.QFT.compute_matrix(4), wires=range(4))  # no wire of it can be global
        return qml.expval(qml.X(2))

    drawn = qml.set_shots(qml.QNode(sampling, device), 200)(angles())
    found = [*qml.QNode(states, device)(angles()), qml.QNode(narrow, device)(), *(drawn[n] for n in (0, 1, 2, 4, 5))]
    return [np.asarray(each) for each in found], np.asarray(jacobian(device, diff_method="adjoint"))


def test_two_ranks_give_the_results_of_one_process(pools: Callable[[str, int], RankPool]) -> None:
    alone, gradient = on_ranks(None)
    for found, shared in pools("gloo", 2).run(on_ranks):
        for ours, expected in zip(found, alone, strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-10)
        np.testing.assert_allclose(shared, gradient, atol=1e-10)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 2}, "ranks=2 in a job of 1: start it with `unisono run -n 2`"),
        ({"ranks": 3}, "ranks=3: expected a power of two"),
        ({"ranks": "2"}, "ranks='2': expected a power of two"),
        ({"c_dtype": np.float64}, "c_dtype=.*expected np.complex64 or np.complex128"),
        ({"wires": 0}, "wires=0: expected 1 or more"),
        ({"seed": "x"}, "seed='x'.*expected a whole number"),
        ({"kernel": "x"}, "kernel"),
        ({"device": "tpu"}, "device 'tpu'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        UnisonoQubit(**{"wires": 2, **options})


def test_bad_circuits() -> None:
    def run(measured: Callable[[], Any], device: Any = None, **options: Any) -> None:
        def circuit() -> Any:
            qml.RX(pnp.array(0.3, requires_grad=True), wires=0)
            return measured()

        qml.QNode(circuit, device or UnisonoQubit(2), **options)()

    with pytest.raises(DeviceError, match=r"not accepted for analytic simulation on unisono\.qubit"):
        run(lambda: qml.sample(wires=0))
    with pytest.raises(qml.exceptions.WireError, match="not found on the device"):
        run(lambda: qml.expval(qml.Z(5)))
    with pytest.raises(DeviceError, match="defers mid-circuit measurements"):
        run(lambda: qml.expval(qml.Z(0)), mcm_method="tree-traversal")
    with pytest.raises(qml.exceptions.QuantumFunctionError, match="does not support adjoint"):
        run(lambda: qml.probs(wires=0), diff_method="adjoint")
    with pytest.raises(UsageError, match="expected real ones"):
        run(lambda: qml.expval(1j * qml.Z(0)))
