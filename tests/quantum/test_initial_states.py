"""Initial states, amplitude embedding and differentiable states: against PennyLane and torch on dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum import dense
from tests.ranks import RankPool
from unisono import quantum as uq
from unisono.errors import UsageError

Pools = Callable[[str, int], RankPool]
OBSERVABLES: list[Any] = ["Z0", "X1 Y2", uq.Projector("01", (0, 2))]


def circuit() -> uq.Circuit:
    made = uq.Circuit(3).h(0)
    for wire in range(3):
        made.ry(wire, uq.weight(wire)).rz(wire, uq.weight(3) - uq.feature(0))
    return made.cnot_ring().rxx(0, 2, uq.weight(4))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def states(batch: int) -> torch.Tensor:
    return uq.amplitude_embedding(torch.complex(numbers(batch, 8), numbers(batch, 8, seed=1)), 3)


def slopes(out: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and gradients of a function of it."""
    loss = (out.abs() ** 2 * torch.arange(1, out.numel() + 1).view(out.shape).cos()).sum() + out.real.sum()
    return [out.detach(), *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("observed", [True, False])
def test_gradients_of_initial_states_equal_torch_on_dense_matrices(observed: bool) -> None:
    """dense.unitary has no gradients of weights: those are compared by another test."""
    weights, x, initial = numbers(5), numbers(2, 1), states(2).requires_grad_()
    found = uq.evaluate(circuit(), OBSERVABLES if observed else (), weights=weights, features=x, initial=initial)
    matrices = [torch.from_numpy(dense.unitary(circuit(), weights.tolist(), each.tolist())) for each in x]
    final = torch.stack([matrix @ psi for matrix, psi in zip(matrices, initial, strict=True)])
    expected = final
    if observed:
        read = uq.Layer(circuit(), OBSERVABLES).output.observables
        operators = [torch.from_numpy(dense.observable_matrix(each, 3)) for each in read]
        expected = torch.stack([((final.conj() @ each) * final).sum(1).real for each in operators], dim=1)
    for mine, theirs in zip(slopes(found, [initial]), slopes(expected, [initial]), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_amplitude_embedding_equals_pennylane() -> None:
    qml = pytest.importorskip("pennylane")

    @qml.qnode(qml.device("default.qubit", wires=3), interface="torch", diff_method="backprop")
    def node(w: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> Any:
        qml.AmplitudeEmbedding(a, wires=range(3), pad_with=0.5, normalize=True)
        qml.Hadamard(0)
        for wire in range(3):
            qml.RY(w[wire], wires=wire)
            qml.RZ(w[3] - x[0], wires=wire)
        for wire in range(3):
            qml.CNOT([wire, (wire + 1) % 3])
        qml.IsingXX(w[4], wires=[0, 2])
        return qml.expval(qml.Z(0)), qml.expval(qml.X(1) @ qml.Y(2)), qml.expval(qml.Projector([0, 1], wires=[0, 2]))

    given = [each.requires_grad_() for each in (numbers(5), numbers(1, seed=2), numbers(6, seed=3))]
    weights, x, data = given
    initial = uq.amplitude_embedding(data, 3, pad=0.5)
    found = uq.evaluate(circuit(), OBSERVABLES, weights=weights, features=x, initial=initial)
    for mine, theirs in zip(slopes(found, given), slopes(torch.stack(node(weights, x, data)), given), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


def test_states_go_from_circuit_to_circuit() -> None:
    """Two circuits one after the other are one circuit, gradients included; so are those of one sample and a batch."""
    first, second = circuit(), circuit().shifted(5)
    weights, x = numbers(10).requires_grad_(), numbers(2, 1).requires_grad_()
    psi = uq.evaluate(first, weights=weights[:5], features=x)
    chained = uq.evaluate(circuit(), OBSERVABLES, weights=weights[5:], features=x, initial=psi)
    joined = uq.evaluate(first + second, OBSERVABLES, weights=weights, features=x)
    for mine, theirs in zip(slopes(chained, [weights, x]), slopes(joined, [weights, x]), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    psi = uq.evaluate(first, weights=weights[:5], features=x)
    fidelity = (psi[0].conj() @ psi[1].detach()).abs() ** 2
    assert torch.autograd.grad(fidelity, weights)[0][:5].abs().sum() > 0


def on_ranks(comm: Any) -> list[np.ndarray]:
    """A batch of states, and one for all samples of a circuit that measures in the middle and is sampled."""
    initial, weights, x = states(3).requires_grad_(), numbers(5).requires_grad_(), numbers(3, 1).requires_grad_()
    options: dict[str, Any] = {"comm": comm, "kernel": "reference"}
    out = uq.evaluate(circuit(), OBSERVABLES, weights=weights, features=x, initial=initial, **options)
    found = slopes(out, [initial, weights, x])
    dynamic = uq.Circuit(3, bits=1).ry(0, uq.weight(0)).measure(0, 0).apply("x", 1, condition={0: 1}).h(0)
    one = states(1)[0].requires_grad_()
    found += slopes(uq.evaluate(dynamic, ["X0", "Z1"], weights=weights[:1], initial=one, **options), [one, weights])
    fixed = states(2)
    found.append(uq.evaluate(dynamic, "X1", weights=[0.4], initial=fixed, shots=50, **options).detach())
    return [each.numpy() for each in found]


@pytest.mark.filterwarnings("ignore:.*ranks")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_initial_states_on_ranks(pools: Pools, size: int) -> None:
    alone = on_ranks(None)
    for answer in pools("gloo", size).run(on_ranks):
        for mine, theirs in zip(answer, alone, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-12, rtol=0)


def test_shots_of_initial_states() -> None:
    psi = states(1)[0]
    exact, found = (uq.evaluate(uq.Circuit(3).h(1), ["X1", "Z0"], initial=psi, shots=each) for each in (None, 10_000))
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0)


def test_what_is_refused() -> None:
    layer, psi = uq.Layer(circuit(), "Z0"), states(2)
    for given, words in (
        ([1, 0], "expected a tensor of 8 amplitudes"),
        (torch.ones(4), r"initial of shape \(4,\): expected \(8,\) or \(batch, 8\)"),
        (torch.ones(8), "initial amplitudes of norm 2.82843: expected 1"),
        (torch.full((8,), torch.nan), "initial amplitudes of norm nan: expected 1"),
        (psi, "2 initial states for a batch of 3"),
    ):
        with pytest.raises(UsageError, match=words):
            layer(torch.zeros(3, 1), given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected diff='adjoint'"):
        uq.Layer(circuit(), "Z0", shots=10)(torch.zeros(2, 1), psi.requires_grad_())
    with pytest.raises(UsageError, match="9 numbers: 3 wires have 8 amplitudes"):
        uq.amplitude_embedding(torch.ones(9), 3)
    with pytest.raises(UsageError, match="norm is zero"):
        uq.amplitude_embedding(torch.zeros(8), 3)
