"""Layers whose circuits have channels: outputs and gradients against default.mixed, and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum.test_noise import noisy_circuit
from tests.ranks import RankPool
from unisono import quantum as uq
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit

Pools = Callable[[str, int], RankPool]
READ: list[Any] = ["Z0", "X1 Y2", 0.5 * uq.Y(0) - uq.Z(2), uq.Projector("01", (0, 2))]
WEIGHTS = torch.tensor([0.4, 1.3, -0.8], dtype=torch.float64)
BATCH = torch.tensor([[0.3], [-1.1]], dtype=torch.float64)
SCALE = torch.arange(1, 9, dtype=torch.float64).view(2, 4).cos()


def circuit() -> Circuit:
    made = Circuit(3).ry(0, uq.weight(0)).depolarizing(0, 0.1).cnot(0, 1).amplitude_damping(1, 0.3)
    made.rx(1, uq.weight(1) + uq.feature(0)).crz(1, 2, uq.weight(2)).ry(2, uq.weight(1)).phase_damping(2, 0.2)
    return made.rxx(0, 2, uq.weight(2)).bit_flip(0, 0.15).rz(0, uq.feature(0)).rx(0, 0.4)


def pennylane() -> list[torch.Tensor]:
    """Outputs and gradients, by autograd: with torch, default.mixed makes channels in single precision."""
    qml = pytest.importorskip("pennylane")

    @qml.qnode(qml.device("default.mixed", wires=3), interface="autograd", diff_method="backprop")
    def node(w: Any, x: Any) -> Any:
        qml.RY(w[0], wires=0)
        qml.DepolarizingChannel(0.1, wires=0)
        qml.CNOT(wires=[0, 1])
        qml.AmplitudeDamping(0.3, wires=1)
        qml.RX(w[1] + x, wires=1)
        qml.CRZ(w[2], wires=[1, 2])
        qml.RY(w[1], wires=2)
        qml.PhaseDamping(0.2, wires=2)
        qml.IsingXX(w[2], wires=[0, 2])
        qml.BitFlip(0.15, wires=0)
        qml.RZ(x, wires=0)
        qml.RX(0.4, wires=0)
        read = [qml.Z(0), qml.X(1) @ qml.Y(2), 0.5 * qml.Y(0) - qml.Z(2), qml.Projector([0, 1], wires=[0, 2])]
        return tuple(qml.expval(each) for each in read)

    def outputs(w: Any, x: Any) -> Any:
        return qml.math.stack([qml.math.stack(node(w, sample[0])) for sample in x])

    given = [qml.numpy.array(each.numpy(), requires_grad=True) for each in (WEIGHTS, BATCH)]
    slopes = qml.grad(lambda w, x: qml.math.sum(outputs(w, x) * SCALE.numpy()))(*given)
    return [torch.tensor(np.array(each)) for each in (outputs(*given), *slopes)]


def values(out: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    scale = torch.arange(1, out.numel() + 1, dtype=torch.float64).view(out.shape).cos()
    return [out.detach(), *torch.autograd.grad((out * scale).sum(), given)]


@pytest.mark.parametrize("diff", ["adjoint", "parameter-shift"])
def test_gradients_through_channels_equal_default_mixed(diff: str) -> None:
    expected, x = pennylane(), BATCH.clone().requires_grad_()
    layer = uq.Layer(circuit(), READ, weights=WEIGHTS, dtype=torch.complex128, diff=diff)
    for mine, theirs in zip(values(layer(x), [layer.weights, x]), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("output", ["expectations", "probabilities"])
def test_random_circuits_with_every_channel(output: str) -> None:
    """The adjoint method against finite differences; outputs against a DensityState."""
    made, read = noisy_circuit(4), ["Z0", "X1 Y2", "Y3"] if output == "expectations" else ()
    found = []
    for diff in ("adjoint", "finite-diff"):
        layer = uq.Layer(
            made, read, output=output, weights=[0.7, -0.2], dtype=torch.complex128, diff=diff, kernel="reference"
        )
        found.append(values(layer(), [layer.weights]))
    torch.testing.assert_close(found[0], found[1], atol=1e-7, rtol=0)
    rho = uq.DensityState(made.wires).run(made, [0.7, -0.2])
    expected = rho.expectations(read) if read else rho.probabilities()
    torch.testing.assert_close(found[0][0], expected, atol=1e-12, rtol=0)


def on_ranks(comm: Any) -> list[np.ndarray]:
    x = BATCH.clone().requires_grad_()
    layer = uq.Layer(circuit(), READ, comm, weights=WEIGHTS, dtype=torch.complex128, kernel="reference")
    found = values(layer(x), [layer.weights, x])
    psi = uq.amplitude_embedding(torch.arange(1, 9, dtype=torch.float64), 3)
    return [each.numpy() for each in (*found, layer(BATCH, psi).detach())]


@pytest.mark.filterwarnings("ignore:.*ranks")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_many_ranks_one_gradient(pools: Pools, size: int) -> None:
    alone = on_ranks(None)
    for answer in pools("gloo", size).run(on_ranks):
        for mine, theirs in zip(answer, alone, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-12, rtol=0)


def test_initial_states_are_mixed_by_channels() -> None:
    psi = uq.amplitude_embedding(torch.tensor([1.0, 2.0, 0.5, -1.0], dtype=torch.complex128) * 1j, 2)
    made = Circuit(2).depolarizing(0, 0.2).h(1).amplitude_damping(1, 0.4)
    rho = uq.DensityState(2).set_matrix(torch.outer(psi, psi.conj())).run(made)
    found = uq.evaluate(made, ["Z0", "X1", "Y0 Z1"], initial=psi)
    torch.testing.assert_close(found.detach(), rho.expectations(["Z0", "X1", "Y0 Z1"]), atol=1e-12, rtol=0)


def test_weights_of_what_never_happens_have_no_gradient() -> None:
    made = Circuit(1, bits=1).ry(0, uq.weight(0)).apply("rx", 0, uq.weight(1), condition={0: 1})
    for circuit_ in (made, Circuit(1).ry(0, uq.weight(0)).bit_flip(0, 0.1).apply("gphase", (), uq.weight(1))):
        layer = uq.Layer(circuit_, "Z0", weights=[0.3, 0.7], dtype=torch.complex128)
        (slope,) = torch.autograd.grad(layer().sum(), layer.weights)
        assert slope[0] != 0
        assert slope[1] == 0


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="13 wires with channels: at most 12 wires without shots"):
        uq.Layer(Circuit(13).bit_flip(0, 0.1), "Z0")
    dependent = Circuit(1, bits=1).bit_flip(0, 0.1).measure(0, 0).apply("x", 0, condition={0: 1})
    with pytest.raises(UsageError, match="depends on a measured bit"):
        uq.Layer(dependent, "Z0")
    with pytest.raises(UsageError, match="initial amplitudes that need a gradient, and channels"):
        uq.Layer(Circuit(1).bit_flip(0, 0.1), "Z0")(initial=torch.tensor([1.0, 0.0], requires_grad=True))


# ---- strengths of channels as parameters ---------------------------------------------------------------------------

STRENGTHS = torch.tensor([0.4, 0.12, 0.3, 0.25, 0.07], dtype=torch.float64)
FEATURES = torch.tensor([[0.2], [0.35]], dtype=torch.float64)


def with_strengths() -> Circuit:
    """Every channel that has a strength, as an expression; a weight in a gate and in channels; two in a row."""
    made = Circuit(3).ry(0, uq.weight(0)).depolarizing(0, uq.weight(1)).cnot(0, 1)
    made.amplitude_damping(1, uq.weight(2), 0.2).phase_damping(1, 0.5 * uq.weight(2) + uq.feature(0)).bit_flip(1, 0.1)
    made.rx(1, uq.weight(3)).cnot(1, 2).depolarizing((0, 2), 2 * uq.weight(4)).bit_flip(2, uq.weight(3))
    return made.ry(2, 0.7).phase_flip(0, 1 - 2 * uq.feature(0)).h(0)


@pytest.mark.parametrize("output", ["expectations", "probabilities"])
def test_gradients_of_strengths_are_finite_differences(output: str) -> None:
    found, read = [], READ if output == "expectations" else ()
    for diff in ("adjoint", "finite-diff"):
        x = FEATURES.clone().requires_grad_()
        layer = uq.Layer(with_strengths(), read, output=output, weights=STRENGTHS, dtype=torch.complex128, diff=diff)
        found.append(values(layer(x), [layer.weights, x]))
    torch.testing.assert_close(found[0], found[1], atol=1e-7, rtol=0)
    assert (found[0][1].abs() > 1e-3).all()
    for sample, out in zip(FEATURES, found[0][0], strict=True):
        rho = uq.DensityState(3).run(with_strengths(), STRENGTHS, sample)
        torch.testing.assert_close(out, rho.expectations(read) if read else rho.probabilities(), atol=1e-12, rtol=0)


def test_gradients_of_strengths_equal_default_mixed() -> None:
    qml = pytest.importorskip("pennylane")

    @qml.qnode(qml.device("default.mixed", wires=2), interface="autograd", diff_method="backprop")
    def node(p: Any) -> Any:
        qml.RY(0.8, wires=0)
        qml.DepolarizingChannel(p[0], wires=0)
        qml.CNOT(wires=[0, 1])
        qml.AmplitudeDamping(p[1], wires=1)
        qml.RX(0.4, wires=0)
        qml.PhaseDamping(p[2], wires=0)
        qml.BitFlip(p[3], wires=1)
        qml.RX(0.9, wires=0)
        return qml.expval(qml.Z(0) @ qml.Z(1) + 0.3 * qml.Z(1))

    p = [0.2, 0.3, 0.15, 0.05]
    made = Circuit(2).ry(0, 0.8).depolarizing(0, uq.weight(0)).cnot(0, 1).amplitude_damping(1, uq.weight(1))
    made.rx(0, 0.4).phase_damping(0, uq.weight(2)).bit_flip(1, uq.weight(3)).rx(0, 0.9)
    layer = uq.Layer(made, uq.Z(0) @ uq.Z(1) + 0.3 * uq.Z(1), weights=p, dtype=torch.complex128)
    out = layer().sum()
    (slopes,) = torch.autograd.grad(out, layer.weights)
    given = qml.numpy.array(p, requires_grad=True)
    assert out.item() == pytest.approx(float(node(given)), abs=1e-10)
    np.testing.assert_allclose(slopes.numpy(), np.array(qml.grad(node)(given)), atol=1e-10)


def strengths_on_ranks(comm: Any) -> list[np.ndarray]:
    x = FEATURES.clone().requires_grad_()
    layer = uq.Layer(with_strengths(), READ, comm, weights=STRENGTHS, dtype=torch.complex128, kernel="reference")
    return [each.numpy() for each in values(layer(x), [layer.weights, x])]


@pytest.mark.filterwarnings("ignore:.*ranks")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_many_ranks_one_gradient_of_strengths(pools: Pools, size: int) -> None:
    alone = strengths_on_ranks(None)
    for answer in pools("gloo", size).run(strengths_on_ranks):
        for mine, theirs in zip(answer, alone, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-12, rtol=0)


def test_strengths_are_numbers_where_circuits_are_run() -> None:
    made, values_ = Circuit(1).ry(0, uq.weight(0)).bit_flip(0, uq.weight(1)), [0.6, 0.2]
    plain = Circuit(1).ry(0, 0.6).bit_flip(0, 0.2)
    mine, theirs = (uq.trajectories(each, 50, "Z0", weights=w, seed=2) for each, w in ((made, values_), (plain, [])))
    assert torch.equal(mine.values, theirs.values)
    bits = [uq.measured(each.copy().measure_all(), 50, weights=w, seed=2) for each, w in ((made, values_), (plain, []))]
    assert torch.equal(*bits)
    assert made.draw().strip() == "0: ─RY(w0)──BF(w1)──"
    assert made == made.copy() != Circuit(1).ry(0, uq.weight(0)).phase_flip(0, uq.weight(1))


def test_strengths_that_are_refused() -> None:
    made = Circuit(1).h(0).phase_damping(0, uq.weight(0))
    with pytest.raises(UsageError, match=r"phase_damping: probability .*, expected a number of 0 to 1"):
        uq.Layer(made, "X0", weights=[1.5])()
    with pytest.raises(UsageError, match="phase_damping of strength 1 has no derivative there"):
        uq.Layer(made, "X0", weights=[1.0], dtype=torch.complex128)().sum().backward()
    for options in ({"shots": 10}, {"diff": "parameter-shift"}):
        with pytest.raises(UsageError, match="has no parameter-shift rule"):
            uq.Layer(made, "X0", weights=[0.5], **options)
    with pytest.raises(UsageError, match="expected a number of 0 to 1"):
        uq.phase_damping(uq.weight(0))  # type: ignore[arg-type]
