"""Layers with shots and with measurements in the middle: against PennyLane, all branches, and themselves on ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum import dense
from tests.ranks import RankPool
from unisono import quantum as uq
from unisono.errors import UsageError
from unisono.quantum import layer as layer_module
from unisono.quantum.circuit.deferred import deferred
from unisono.quantum.gradients.shot_estimates import measurement_bases
from unisono.quantum.observables.observable import observables

Pools = Callable[[str, int], RankPool]
READ: list[Any] = [uq.Z(0), "X1 Z2", 0.5 * uq.Y(2) - 2 * uq.Z(1) + 1, uq.Projector("01", (0, 2))]
SCALE = torch.tensor([1.0, 0.5, -2.0, 0.7], dtype=torch.float64)


def measuring() -> uq.Circuit:
    """Measured wires that are mixed again, conditions on several bits and on 0, a reset, a bit measured twice."""
    made = uq.Circuit(3, bits=2)
    made.ry(0, uq.weight(0)).cnot(0, 1).rx(1, uq.weight(1) + uq.feature(0)).measure(0, 0)
    made.apply("ry", 1, uq.weight(2), condition={0: 1}).rx(0, uq.weight(3)).measure(1, 1).reset(1)
    made.apply("rx", 2, uq.weight(4), condition={0: 1, 1: 1}).apply("ry", 1, uq.weight(4), condition={1: 0})
    return made.measure(2, 0).apply("crz", (1, 2), uq.feature(0), condition={0: 0})


def pennylane(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    qml = pytest.importorskip("pennylane")

    @qml.qnode(qml.device("default.qubit"), interface="torch", diff_method="backprop", mcm_method="deferred")
    def node(w: torch.Tensor, x: torch.Tensor) -> Any:
        qml.RY(w[0], wires=0)
        qml.CNOT(wires=[0, 1])
        qml.RX(w[1] + x, wires=1)
        first = qml.measure(0)
        qml.cond(first, qml.RY)(w[2], wires=1)
        qml.RX(w[3], wires=0)
        second = qml.measure(1, reset=True)
        qml.cond(first & second, qml.RX)(w[4], wires=2)
        qml.cond(second == 0, qml.RY)(w[4], wires=1)
        third = qml.measure(2)
        qml.cond(third == 0, qml.CRZ)(x, wires=[1, 2])
        combined = 0.5 * qml.Y(2) - 2 * qml.Z(1) + 1 * qml.Identity(0)
        read = [qml.Z(0), qml.X(1) @ qml.Z(2), combined, qml.Projector([0, 1], wires=[0, 2])]
        return tuple(qml.expval(each) for each in read)

    return torch.stack([torch.stack(node(weights, sample[0])) for sample in x])


def values(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of weights and inputs."""
    weights, given = layer.weights, x.clone().requires_grad_()
    out = layer(given)
    return [out.detach(), *torch.autograd.grad((out * SCALE).sum(), [weights, given])]


BATCH = torch.tensor([[0.3], [-1.1]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.4, 1.3, -0.8, 2.1, 0.9], dtype=torch.float64)


def layer(comm: Any = None, **options: Any) -> uq.Layer:
    return uq.Layer(measuring(), READ, comm, dtype=torch.complex128, weights=WEIGHTS, **options)


@pytest.mark.parametrize("diff", ["adjoint", "parameter-shift"])
def test_measurements_in_the_middle_equal_pennylane(diff: str) -> None:
    weights, x = WEIGHTS.clone().requires_grad_(), BATCH.clone().requires_grad_()
    expected = pennylane(weights, x)
    slopes = torch.autograd.grad((expected * SCALE).sum(), [weights, x])
    for mine, theirs in zip(values(layer(diff=diff), BATCH), [expected.detach(), *slopes], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


def dynamic(seed: int, gates: int = 14) -> uq.Circuit:
    """Random gates, measurements and resets, half of them under conditions."""
    draw = np.random.default_rng(seed)
    made = uq.Circuit(3, bits=3)
    for _ in range(gates):
        wires = [int(wire) for wire in draw.permutation(3)]
        condition = {int(bit): int(draw.integers(2)) for bit in draw.permutation(3)[: draw.integers(0, 3)]}
        kind = draw.choice(["ry", "rx", "h", "cx", "cz", "swap", "t", "measure", "measure", "reset"])
        targets = wires[: 2 if kind in ("cx", "cz", "swap") else 1]
        if kind == "measure":
            operation = uq.Circuit(3, bits=3).measure(wires[0], int(draw.integers(3))).operations[0]
            made.append(
                uq.Operation(operation.gate, operation.targets, (), (), operation.bits, tuple(condition.items()))
            )
        else:
            angles = [float(draw.uniform(0, 3))] if kind in ("rx", "ry") else []
            made.apply(str(kind), targets, *angles, condition=condition)
    return made


@pytest.mark.parametrize("seed", range(12))
def test_deferred_measurement_is_the_mean_over_all_outcomes(seed: int) -> None:
    made, read = dynamic(seed), observables(["Z0", "X1", "Y0 Z2", "X2 Y1"])
    expected = [sum(p * dense.expectation(state, each) for p, _, state in dense.branches(made)) for each in read]
    found = uq.Layer(made, read, dtype=torch.complex128, kernel="reference")()
    torch.testing.assert_close(found.tolist(), expected, atol=1e-12, rtol=0)
    chances = sum(p * np.abs(state) ** 2 for p, _, state in dense.branches(made))
    found = uq.Layer(made, output="probabilities", dtype=torch.complex128, kernel="reference")()
    np.testing.assert_allclose(found.detach().numpy(), chances, atol=1e-12)


def test_measured_wires_that_nothing_mixes_take_no_spare_wire() -> None:
    teleport = uq.Circuit(3, bits=2).ry(0, 0.7).h(1).cnot(1, 2).cnot(0, 1).h(0).measure(0, 0).measure(1, 1)
    teleport.apply("x", 2, condition={1: 1}).apply("z", 2, condition={0: 1})
    assert deferred(teleport).wires == 3
    assert deferred(teleport, [1]).wires == 4
    assert uq.Layer(teleport, "Z2", dtype=torch.complex128)().item() == pytest.approx(np.cos(0.7))
    reuse = uq.Circuit(1, bits=3).h(0).measure(0, 0).reset(0).h(0).measure(0, 1).reset(0).h(0).measure(0, 2)
    assert deferred(reuse).wires == 3


def test_shots_are_estimates_and_depend_on_the_seed_and_the_call_only() -> None:
    exact, estimate = values(layer(), BATCH), layer(shots=20_000, seed=5)
    first = values(estimate, BATCH)
    for mine, theirs in zip(first, exact, strict=True):
        assert (mine - theirs).abs().max() < 5 * 3 / 20_000**0.5  # the largest standard deviation is about 3
    again, other = layer(shots=20_000, seed=5), layer(shots=20_000, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first, values(again, BATCH), strict=True))
    copied = copy.deepcopy(again)
    assert not torch.equal(again(BATCH), first[0])
    assert not torch.equal(other(BATCH), first[0])
    torch.testing.assert_close(copied(BATCH), copy.deepcopy(estimate)(BATCH), atol=0, rtol=0)


@pytest.mark.thorough
def test_gradients_from_shots_are_unbiased() -> None:
    exact, estimate = values(layer(), BATCH), layer(shots=100, seed=1)
    found = [values(estimate, BATCH) for _ in range(150)]
    for at, theirs in enumerate(exact):
        several = torch.stack([each[at] for each in found])
        error = several.std(0) / len(several) ** 0.5
        assert ((several.mean(0) - theirs).abs() <= 4.5 * error + 1e-12).all()


def test_trajectories_where_deferring_takes_too_many_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = values(layer(), BATCH)
    monkeypatch.setattr(layer_module, "MOST_SPARE", 0)
    sampled = layer(shots=400)
    assert sampled.by_trajectories
    assert sampled.wires == 3
    assert (sampled(BATCH) - exact[0]).abs().max() < 5 * 2.1 / 400**0.5


def test_shots_of_noisy_circuits_are_trajectories() -> None:
    made = uq.Circuit(2).ry(0, uq.weight(0)).depolarizing(0, 0.3).cnot(0, 1).amplitude_damping(1, 0.2)
    found = uq.Layer(made, ["Z0", "Z1"], weights=[0.6], shots=2000, dtype=torch.complex128)()
    expected = uq.DensityState(2).run(made, [0.6]).expectations(["Z0", "Z1"])
    assert (found - expected).abs().max() < 5 / 2000**0.5


def test_probabilities_from_shots() -> None:
    made = uq.Circuit(2).ry(0, uq.weight(0)).cnot(0, 1).rx(1, 0.5)
    exact, found = (
        uq.Layer(made, output="probabilities", weights=[0.9], dtype=torch.complex128, shots=shots)
        for shots in (None, 40_000)
    )
    outputs = [each() for each in (exact, found)]
    assert outputs[1].sum().item() == pytest.approx(1)
    torch.testing.assert_close(*outputs, atol=0.02, rtol=0)
    slopes = [torch.autograd.grad(out[0], each.weights)[0] for out, each in zip(outputs, (exact, found), strict=True)]
    torch.testing.assert_close(*slopes, atol=0.02, rtol=0)


def test_pauli_strings_that_agree_on_every_wire_share_a_basis() -> None:
    strings = [((0, "Z"),), ((0, "Z"), (1, "X")), ((1, "X"), (2, "Y")), ((1, "Z"),), ((2, "X"),)]
    bases, place = measurement_bases(strings)
    assert bases == [{0: "Z", 1: "X", 2: "Y"}, {1: "Z", 2: "X"}]
    assert place[((1, "X"), (2, "Y"))] == (0, [1, 2])


def on_ranks(comm: Any, sparing: int) -> list[np.ndarray]:
    layer_module.MOST_SPARE = sparing
    exact = values(layer(comm, kernel="reference"), BATCH)
    sampled = values(layer(comm, kernel="reference", shots=150, seed=3), BATCH[:1])
    layer_module.MOST_SPARE = 4
    return [each.numpy() for each in (*exact, *sampled)]


@pytest.mark.filterwarnings("ignore:.*ranks")
@pytest.mark.parametrize(
    ("size", "sparing"),
    [(2, 4), pytest.param(4, 4, marks=pytest.mark.thorough), pytest.param(2, 0, marks=pytest.mark.thorough)],
)
def test_many_ranks_draw_the_shots_of_one(pools: Pools, size: int, sparing: int) -> None:
    alone = on_ranks(None, sparing)
    for answer in pools("gloo", size).run(on_ranks, sparing):
        for mine, theirs in zip(answer, alone, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-12, rtol=0)


def test_what_is_refused() -> None:
    made = measuring()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"shots": 0}, "shots=0: expected a whole number of at least 1"),
        ({"shots": 10, "diff": "adjoint"}, "diff='adjoint' with shots: expected 'parameter-shift'"),
        ({"shots": 10, "output": "state", "observables": ()}, "has no single final state"),
    )
    for options, words in cases:
        with pytest.raises(UsageError, match=words):
            uq.Layer(made, **{"observables": "Z0", **options})
    with pytest.raises(UsageError, match="cannot be estimated from shots"):
        uq.Layer(uq.Circuit(1).h(0), output="state", shots=10)
