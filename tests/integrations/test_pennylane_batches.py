"""Batches of parameters on unisono.qubit: one circuit for all samples, and what default.qubit makes of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import RankPool
from unisono.errors import UsageError

qml = pytest.importorskip("pennylane", reason="pennylane is not installed")
pytest.importorskip("numba", reason="numba is not installed")
from pennylane import numpy as pnp  # noqa: E402

from unisono.integrations.pennylane import UnisonoQubit  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_kernels")
WIRES = 3
HERMITIAN = np.array([[1.0, 0.5 - 0.2j], [0.5 + 0.2j, -0.3]])


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """The CPU kernels, compiled once and kept on disk, so that ranks need not all compile them at once."""
    gradients(UnisonoQubit(WIRES), 2)


def samples(batch: int, width: int = WIRES) -> np.ndarray:
    return np.random.default_rng(batch).uniform(0, 3, (batch, width))


def weights() -> np.ndarray:
    return np.random.default_rng(7).uniform(0, 6, (2, WIRES, 3))


def gates(x: Any, w: Any) -> None:
    """Gates whose angles come from the batch, from all samples' weights, or from both."""
    qml.BasisState([1, 0], wires=[0, 2])
    qml.AngleEmbedding(x, wires=range(WIRES), rotation="Y")
    qml.StronglyEntanglingLayers(w, wires=range(WIRES))
    qml.adjoint(qml.RX)(x[:, 0], wires=1)
    qml.ctrl(qml.Rot, control=2, control_values=[0])(x[:, 1], w[0, 0, 0], 0.3, wires=0)
    qml.adjoint(qml.ctrl(qml.PhaseShift(x[:, 2], wires=0), control=1))
    qml.CRot(x[:, 0], w[1, 0, 0], x[:, 1], wires=[1, 2])
    qml.PauliRot(x[:, 1], "XIY", wires=[0, 1, 2])
    qml.PauliRot(x[:, 1], "II", wires=[0, 1])
    qml.MultiRZ(x[:, 2], wires=[2, 0])
    qml.GlobalPhase(x[:, 0])
    qml.SingleExcitation(x[:, 2], wires=[0, 1])
    qml.QubitUnitary(qml.Hadamard.compute_matrix(), wires=1)


def one(x: Any, w: Any) -> Any:
    gates(x, w)
    return qml.expval(qml.X(1) @ qml.Y(2) + 0.3 * qml.Z(0))


def several(x: Any, w: Any) -> Any:
    gates(x, w)
    return (
        qml.expval(qml.Z(0)),
        qml.expval(qml.X(1) @ qml.Y(2) + 0.5 * qml.Hermitian(HERMITIAN, 0)),
        qml.expval(qml.Projector([0, 1], wires=[0, 2])),
    )


def same(function: Callable[..., Any], *args: Any, circuits: int, wires: Any = WIRES, **options: Any) -> None:
    """The QNode's results on unisono.qubit and on default.qubit, in value and shape, from so many circuits."""
    device = UnisonoQubit(wires)
    with qml.Tracker(device) as tracker:
        ours = qml.QNode(function, device, **options)(*args)
    theirs = qml.QNode(function, qml.device("default.qubit", wires=wires))(*args)
    assert tracker.totals["simulations"] == circuits
    ours, theirs = (each if isinstance(each, tuple | list) else (each,) for each in (ours, theirs))
    for found, expected in zip(ours, theirs, strict=True):
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_allclose(found, expected, atol=1e-10)


# ---- results --------------------------------------------------------------------------------------------------------


def measured(x: Any, w: Any) -> Any:
    gates(x, w)
    wide = qml.Hamiltonian([0.2, -0.7, 0.4], [qml.Z(0) @ qml.Z(2), qml.X(1), qml.Identity(2)])
    return (
        qml.expval(wide),
        qml.var(wide),
        qml.expval(qml.Hermitian(HERMITIAN, 2) @ qml.Z(0)),
        qml.expval(qml.Projector([1, 0], wires=[2, 1])),
        qml.expval(qml.SparseHamiltonian(wide.sparse_matrix(range(WIRES)), wires=range(WIRES))),
        qml.probs(wires=[2, 0]),
        qml.probs(op=qml.X(1)),
        qml.density_matrix([2, 1]),
        qml.purity([0, 1]),
        qml.vn_entropy([2]),
        qml.state(),
    )


def test_every_measurement() -> None:
    same(measured, samples(2), weights(), circuits=1)
    same(measured, samples(5), weights(), circuits=1)


def test_a_batch_of_one() -> None:
    """A dimension of its own, which default.qubit forgets for Hamiltonians."""
    node = qml.QNode(measured, UnisonoQubit(WIRES))
    for found, expected in zip(node(samples(5)[:1], weights()), node(samples(5), weights()), strict=True):
        assert found.shape == (1, *expected.shape[1:])
        np.testing.assert_allclose(found, expected[:1], atol=1e-14)
    same(one, samples(1), weights(), circuits=1)


@pytest.mark.parametrize("wires", [None, ["b", "a", 7]], ids=["none", "labels"])
def test_wires(wires: Any) -> None:
    def circuit(x: Any) -> Any:
        names = wires or [3, 9, 1]
        qml.AngleEmbedding(x, wires=names)
        qml.QFT(wires=names[::-1])
        return qml.expval(qml.X(names[2])), qml.probs(wires=names[1:])

    same(circuit, samples(4), circuits=1, wires=wires)


def test_samples_that_are_equal() -> None:
    x = np.repeat(samples(2), 2, axis=0)
    same(several, x, weights(), circuits=1)
    for found, expected in zip(gradients(UnisonoQubit(WIRES), x), gradients(reference(), x), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-10)


def test_mid_circuit_measurements() -> None:
    def circuit(x: Any) -> Any:
        qml.RX(x, wires=0)
        read = qml.measure(0, reset=True)
        qml.cond(read, qml.RY)(2 * x, wires=1)
        return qml.expval(qml.Z(1)), qml.probs(op=read)

    same(circuit, samples(4)[:, 0], circuits=1, wires=None)


def test_single_precision() -> None:
    found = qml.QNode(one, UnisonoQubit(WIRES, c_dtype=np.complex64))(samples(3), weights())
    np.testing.assert_allclose(found, qml.QNode(one, reference())(samples(3), weights()), atol=1e-5)


def test_what_is_no_angle_is_expanded() -> None:
    vectors = np.random.default_rng(3).normal(size=(4, 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    matrices = np.stack([qml.Rot.compute_matrix(*angles) for angles in samples(4)])

    def prepared(x: Any, vectors: Any) -> Any:
        qml.StatePrep(vectors, wires=range(WIRES))
        qml.RX(x[:, 0], wires=1)
        return qml.probs(wires=[0, 1])

    def multiplied(x: Any, matrices: Any) -> Any:
        qml.RX(x[:, 0], wires=1)
        qml.ctrl(qml.QubitUnitary(matrices, wires=0), control=1)
        return qml.expval(qml.Y(0)), qml.probs(wires=[0, 1])

    def diagonal(x: Any) -> Any:
        qml.Hadamard(0)
        qml.DiagonalQubitUnitary(np.exp(1j * x[:, :2]), wires=0)
        return qml.state()

    same(prepared, samples(4), vectors, circuits=4)
    same(multiplied, samples(4), matrices, circuits=4)
    same(diagonal, samples(4), circuits=4)


def test_shots_are_expanded() -> None:
    def circuit(x: Any) -> Any:
        qml.RX(x, wires=0)
        return qml.expval(qml.Z(0)), qml.sample(wires=0), qml.counts(wires=0)

    device = UnisonoQubit(1, seed=3)
    with qml.Tracker(device) as tracker:
        means, read, counted = qml.set_shots(qml.QNode(circuit, device), 4000)(np.array([0.0, 1.0, np.pi]))
    assert tracker.totals["simulations"] == 3
    np.testing.assert_allclose(means, [1.0, np.cos(1.0), -1.0], atol=0.06)
    assert np.shape(read) == (3, 4000, 1)
    assert [sum(each.values()) for each in counted] == [4000] * 3


# ---- derivatives ----------------------------------------------------------------------------------------------------


def reference() -> Any:
    return qml.device("default.qubit", wires=WIRES)


def gradients(device: Any, x: Any, function: Any = several, trained: str = "xw", **options: Any) -> list[np.ndarray]:
    """Values and gradients by torch of a loss that has another factor for each sample and observable."""
    given = {"x": samples(x) if isinstance(x, int) else x, "w": weights()}
    tensors = {name: torch.tensor(each, requires_grad=name in trained) for name, each in given.items()}
    found = qml.QNode(function, device, interface="torch", **options)(tensors["x"], tensors["w"])
    values = torch.stack(found) if isinstance(found, tuple) else found
    (values.sin() * torch.arange(1.0, values.numel() + 1).reshape(values.shape)).sum().backward()
    kept = [tensors[name].grad for name in trained]
    assert all(each is not None for each in kept)
    return [values.detach().numpy(), *[each.numpy() for each in kept if each is not None]]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # default.qubit's backpropagation
@pytest.mark.parametrize("device_vjp", [False, True], ids=["jacobian", "vjp"])
@pytest.mark.parametrize("trained", ["x", "w", "xw"])
@pytest.mark.parametrize("function", [one, several])
@pytest.mark.parametrize("batch", [1, 4])
def test_torch(batch: int, function: Any, trained: str, device_vjp: bool) -> None:
    device = UnisonoQubit(WIRES)
    with qml.Tracker(device) as tracker:
        ours = gradients(device, batch, function, trained, diff_method="adjoint", device_vjp=device_vjp)
    assert tracker.totals["simulations"] == 1
    assert tracker.totals.get("vjps", 0) + tracker.totals.get("derivatives", 0) == 1
    theirs = gradients(reference(), batch, function, trained, diff_method="backprop")
    for found, expected in zip(ours, theirs, strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-10)


def test_one_trained_parameter() -> None:
    """An array of its own in PennyLane, without a tuple around it."""

    def two(x: Any, w: Any) -> Any:
        qml.RX(x[:, 0], wires=0)
        qml.RY(w[0, 0, 0], wires=0)
        return qml.expval(qml.Z(0)), qml.expval(qml.X(0))

    def single(x: Any, w: Any) -> Any:
        qml.RY(w[0, 0, 0], wires=0)
        qml.RX(x[:, 0], wires=0)
        return qml.expval(qml.Z(0))

    for function, trained, batch in product((two, single), ("x", "w"), (1, 3)):
        ours = gradients(UnisonoQubit(1), batch, function, trained)
        theirs = gradients(reference(), batch, function, trained, diff_method="backprop")
        for found, expected in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-10)


def test_backward_twice() -> None:
    x = torch.tensor(samples(3), requires_grad=True)
    values = qml.QNode(one, UnisonoQubit(WIRES), interface="torch")(x, torch.tensor(weights()))
    first, second = (torch.autograd.grad(values.sum(), x, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-13)


def jacobians(device: Any, batch: int, function: Any, **options: Any) -> list[np.ndarray]:
    """All of autograd's: (observables, batch, shape of x) and (observables, batch, shape of w)."""
    node = qml.QNode(function, device, **options)
    given = [pnp.array(each, requires_grad=True) for each in (samples(batch), weights())]
    found = qml.jacobian(lambda x, w: pnp.stack(node(x, w)))(*given)
    return [np.asarray(each) for each in found]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("function", [one, several])
@pytest.mark.parametrize("options", [{"diff_method": "adjoint"}, {"diff_method": "best", "device_vjp": True}])
def test_autograd(options: dict[str, Any], function: Any, batch: int) -> None:
    expected = jacobians(reference(), batch, function, diff_method="backprop")
    for ours, theirs in zip(jacobians(UnisonoQubit(WIRES), batch, function, **options), expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("method", ["adjoint", "parameter-shift"])
def test_features_that_are_not_trained(method: str) -> None:
    x = pnp.array(samples(3), requires_grad=False)

    def circuit(x: Any, w: Any) -> Any:
        qml.AngleEmbedding(x, wires=range(WIRES))
        qml.StronglyEntanglingLayers(w, wires=range(WIRES))
        return qml.expval(qml.Z(0)), qml.expval(qml.X(1) @ qml.Y(2))

    found = []
    for device, options in ((UnisonoQubit(WIRES), {"diff_method": method}), (reference(), {"diff_method": "backprop"})):
        node = qml.QNode(circuit, device, **options)
        found.append(qml.jacobian(lambda w, node=node: pnp.stack(node(x, w)))(pnp.array(weights(), requires_grad=True)))
    assert found[0].shape == found[1].shape
    np.testing.assert_allclose(found[0], found[1], atol=1e-10)


def test_a_batch_is_one_circuit() -> None:
    """As PennyLane's tracker counts what the device is given: one circuit that stands for 8, forwards and back."""
    device, default = UnisonoQubit(WIRES), reference()
    found = []
    for each, method in ((device, "adjoint"), (default, "backprop")):
        with qml.Tracker(each) as tracker:
            gradients(each, 8, one, diff_method=method)
        names = ("simulations", "executions", "vjps", "derivatives")
        found.append({name: tracker.totals[name] for name in names if name in tracker.totals})
    assert found == [{"simulations": 1, "executions": 8, "vjps": 1}, {"simulations": 1, "executions": 8}]
    assert len(device._simulator._programs) == 1


def test_a_circuit_that_was_expanded_before() -> None:
    """MultiRZ keeps the size of the batch that it was taken from; a sample is one circuit nevertheless."""

    def circuit(x: Any) -> Any:
        qml.RX(x, wires=0)
        qml.MultiRZ(x, wires=[0, 1])
        return qml.expval(qml.Y(0)), qml.probs(wires=0)

    x, device = samples(4)[:, 0], UnisonoQubit(2)
    with qml.Tracker(device) as tracker:
        apart = qml.transforms.broadcast_expand(qml.QNode(circuit, device))(x)
    assert tracker.totals["simulations"] == 4
    for found, expected in zip(apart, qml.QNode(circuit, device)(x), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-14)
    means, chances = qml.set_shots(qml.QNode(circuit, device), 10)(x)
    assert (np.shape(means), np.shape(chances)) == ((4,), (4, 2))


def tape(batch: int, observables: int = 2) -> Any:
    """Parameters 0 and 3 have an angle for each sample; 1 is not trainable."""
    x = samples(batch)
    operators = [qml.RX(x[:, 0], 0), qml.RY(0.4, 1), qml.CRX(0.8, [0, 1]), qml.RY(x[:, 1], 0), qml.RZ(0.3, 1)]
    made = qml.tape.QuantumScript(operators, [qml.expval(qml.Z(1) @ qml.X(0)), qml.expval(qml.Y(1))][:observables])
    made.trainable_params = [0, 2, 3, 4]
    return made


@pytest.mark.parametrize("observables", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_devices_own_derivatives(batch: int, observables: int) -> None:
    """A Jacobian has the dimensions of the result and then of the parameter; products are sums over them."""
    given, device = tape(batch, observables), UnisonoQubit(2)
    config = qml.devices.ExecutionConfig(gradient_method="adjoint")

    def values(*parameters: Any) -> Any:
        made = given.bind_new_parameters(parameters, given.trainable_params)
        return (
            torch.stack(qml.device("default.qubit").execute(made))
            if observables > 1
            else qml.device("default.qubit").execute(made)
        )

    at = tuple(torch.tensor(np.asarray(each, dtype=np.float64)) for each in given.get_parameters())
    expected = [each.numpy() for each in torch.autograd.functional.jacobian(values, at)]
    results, found = device.execute_and_compute_derivatives(given, config)
    np.testing.assert_allclose(np.stack(results) if observables > 1 else results, values(*at).numpy(), atol=1e-12)
    for number, rows in enumerate(found if observables > 1 else (found,)):
        for entry, each in zip(rows, expected, strict=True):
            wanted = each[number] if observables > 1 else each
            assert entry.shape == wanted.shape
            np.testing.assert_allclose(entry, wanted, atol=1e-12)
    tangents = tuple(np.full(each.shape, 0.3 + number) for number, each in enumerate(at))
    _, pushed = device.execute_and_compute_jvp(given, tangents, config)
    wanted = sum(np.tensordot(each, tangent, tangent.ndim) for each, tangent in zip(expected, tangents, strict=True))
    np.testing.assert_allclose(np.stack(pushed) if observables > 1 else pushed, wanted, atol=1e-12)
    cotangents = np.random.default_rng(1).normal(size=(observables, batch) if observables > 1 else (batch,))
    _, products = device.execute_and_compute_vjp(given, tuple(cotangents) if observables > 1 else cotangents, config)
    for entry, each, parameter in zip(products, expected, at, strict=True):
        assert np.shape(entry) == tuple(parameter.shape)
        np.testing.assert_allclose(entry, np.tensordot(cotangents, each, cotangents.ndim), atol=1e-12)


def test_cotangents_of_another_batch() -> None:
    config = qml.devices.ExecutionConfig(gradient_method="adjoint")
    with pytest.raises(UsageError, match=r"cotangents of shape \(4,\) for a batch of 3 samples: expected \(3,\)"):
        UnisonoQubit(2).compute_vjp(tape(3), (np.ones(4), np.ones(4)), config)


def test_a_batch_of_nothing() -> None:
    with pytest.raises(UsageError, match="a batch of 0 samples: expected 1 or more"):
        qml.QNode(one, UnisonoQubit(WIRES))(samples(0), weights())


@pytest.mark.parametrize("sizes", [(3, 2), (3, 1)])
def test_batches_of_two_sizes(sizes: tuple[int, int]) -> None:
    def circuit(x: Any, y: Any) -> Any:
        qml.RX(x, 0)
        qml.RY(y, 1)
        return qml.expval(qml.Z(0))

    first, second = sizes
    with pytest.raises(UsageError, match=f"batches of {second} and {first} samples: expected one size"):
        qml.QNode(circuit, UnisonoQubit(2))(np.ones(first), np.ones(second))


# ---- ranks ----------------------------------------------------------------------------------------------------------


def on_ranks(comm: Any) -> list[np.ndarray]:
    device = UnisonoQubit(WIRES, ranks=comm.size if comm is not None else 1)

    def circuit(x: Any, w: Any) -> Any:
        gates(x, w)
        return qml.probs(op=qml.X(0)), qml.state(), qml.var(qml.X(0) @ qml.Y(2))

    with qml.Tracker(device) as tracker:
        found = [*qml.QNode(circuit, device)(samples(4), weights())]
    assert tracker.totals["simulations"] == 1
    found += gradients(device, 4, diff_method="adjoint")
    return [*found, *jacobians(device, 2, several, diff_method="adjoint")]


def test_two_ranks_give_the_results_of_one_process(pools: Callable[[str, int], RankPool]) -> None:
    alone = on_ranks(None)
    for shared in pools("gloo", 2).run(on_ranks):
        for ours, expected in zip(shared, alone, strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-10)
