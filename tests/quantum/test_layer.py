"""A circuit as a torch layer: outputs and gradients by every method, on one rank and on several."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum import dense
from tests.ranks import RankPool
from unisono import quantum as uq
from unisono.errors import MissingPackageError, UsageError
from unisono.quantum.distributed import memory

Pools = Callable[[str, int], RankPool]
OBSERVABLES: list[Any] = [
    uq.Z(0),
    0.5 * uq.X(1) @ uq.Y(2) + uq.Z(3),
    uq.Hermitian([[1, 2j], [-2j, 0.5]], 1),
    uq.Projector("01", (0, 2)),
]


OUTPUTS = ("expectations", "probabilities", "state")


def circuit() -> uq.Circuit:
    """Every way in which a parameter can enter: shared, scaled, of several gates, under controls, in a swapped wire."""
    made = uq.Circuit(4)
    for wire in range(4):
        made.ry(wire, uq.weight(wire)).rx(wire, 2 * uq.feature(wire % 2) + 0.1)
        made.rz(wire, uq.weight(4 + wire) - uq.feature(1))
    made.cnot_ring().cry(0, 2, uq.weight(8)).rxx(1, 3, uq.weight(9)).crz(3, 0, uq.feature(0))
    made.u3(1, uq.weight(0), uq.weight(3), uq.feature(0)).cp(0, 1, uq.weight(2)).toffoli(0, 1, 2).swap(0, 3)
    return made.rot(2, uq.weight(1), uq.weight(5), 0.3).ryy(0, 2, 0.5 * uq.weight(9))


def batch(size: int = 3) -> torch.Tensor:
    return torch.randn(size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def evaluated(layer: uq.Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and the gradients of weights and inputs for fixed gradients of the output."""
    given = x.clone().requires_grad_()
    layer.weights.grad = None
    out = layer(given)
    (out.abs() * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    assert layer.weights.grad is not None
    assert given.grad is not None
    return out.detach(), layer.weights.grad.clone(), given.grad


def test_outputs_equal_the_dense_reference() -> None:
    layer, x = uq.Layer(circuit(), OBSERVABLES, dtype=torch.complex128), batch()
    states = [dense.state(circuit(), layer.weights.tolist(), sample.tolist()) for sample in x]
    expected = [[dense.expectation(state, each) for each in layer.output.observables] for state in states]
    torch.testing.assert_close(layer(x).detach(), torch.tensor(expected, dtype=torch.float64))
    full = uq.Layer(circuit(), dtype=torch.complex128, output="state")(x).detach()
    torch.testing.assert_close(full, torch.tensor(np.array(states)))
    chances = uq.Layer(circuit(), dtype=torch.complex128, output="probabilities")(x).detach()
    torch.testing.assert_close(chances, torch.tensor(np.abs(np.array(states)) ** 2))


@functools.cache
def alone(size: int, output: str) -> list[np.ndarray]:
    """What one process gives, by the adjoint method."""
    return distributed(None, size, output)


@pytest.mark.parametrize(
    ("diff", "kernel"), [("adjoint", "reference"), ("parameter-shift", "cpu"), ("finite-diff", "cpu")]
)
def test_every_method_gives_the_same_gradients(diff: str, kernel: str) -> None:
    expected = map(torch.from_numpy, alone(3, "expectations"))
    found = evaluated(uq.Layer(circuit(), OBSERVABLES, dtype=torch.complex128, diff=diff, kernel=kernel), batch())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-8 if diff == "finite-diff" else 1e-12, rtol=0)


@pytest.mark.parametrize("output", ["expectations", "state", "probabilities"])
def test_gradcheck(output: str) -> None:
    observables = OBSERVABLES if output == "expectations" else ()
    layer = uq.Layer(circuit(), observables, dtype=torch.complex128, output=output)

    def call(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weights": weights}, (x,))

    given = layer.weights.detach().clone().requires_grad_(), batch(2).requires_grad_()
    assert torch.autograd.gradcheck(call, given)


def test_single_precision_and_states_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = map(torch.from_numpy, alone(3, "expectations"))
    monkeypatch.setattr("unisono.quantum.layer.KEPT", 0)
    found = evaluated(uq.Layer(circuit(), OBSERVABLES), batch())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=5e-5, rtol=0)


def test_trains_inside_a_network() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), uq.Layer(circuit(), OBSERVABLES), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(4, 3)
    y = x[:, :1].sin()
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_one_sample_and_no_features() -> None:
    layer = uq.Layer(circuit(), OBSERVABLES, dtype=torch.complex128)
    torch.testing.assert_close(layer(batch()[0]), layer(batch())[0])
    fixed = uq.Layer(uq.Circuit(2).ry(0, uq.weight(0)).cnot(0, 1), "Z1", weights=[0.4], dtype=torch.complex128)
    assert fixed().item() == pytest.approx(np.cos(0.4))
    assert "exchanges" in fixed.plan()


def distributed(comm: Any, size: int, output: str) -> list[np.ndarray]:
    observables = OBSERVABLES if output == "expectations" else ()
    layer = uq.Layer(circuit(), observables, comm, dtype=torch.complex128, output=output)
    return [each.numpy() for each in evaluated(layer, batch(size))]


def every_output(comm: Any, size: int) -> list[list[np.ndarray]]:
    return [distributed(comm, size, output) for output in OUTPUTS]


@pytest.mark.filterwarnings("ignore:.*ranks")
@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("gloo", 4), ("mpi", 2)])
def test_many_ranks_one_layer(pools: Pools, backend: str, size: int) -> None:
    for answers in pools(backend, size).run(every_output, 4):
        for output, answer in zip(OUTPUTS, answers, strict=True):
            for mine, theirs in zip(answer, alone(4, output), strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-12, rtol=0)


def test_what_is_refused() -> None:
    made = circuit()
    with pytest.raises(UsageError, match="adjoint, parameter-shift, finite-diff"):
        uq.Layer(made, "Z0", diff="magic")
    with pytest.raises(UsageError, match="acts on wire 7"):
        uq.Layer(made, "Z7")
    with pytest.raises(UsageError, match="the circuit reads 10 weights, but 3 were given"):
        uq.Layer(made, "Z0", weights=[1, 2, 3])
    with pytest.raises(UsageError, match=r"expected \(batch, 2\)"):
        uq.Layer(made, "Z0")(torch.zeros(3, 1))
    with pytest.raises(UsageError, match=r"expected \(batch, 2\)"):
        uq.Layer(made, "Z0")()
    with pytest.raises(UsageError, match="needs observables"):
        uq.Layer(made)
    with pytest.raises(UsageError, match="takes no observables"):
        uq.Layer(made, "Z0", output="state")
    with pytest.raises(UsageError, match="no parameter-shift rule"):
        uq.Layer(made, output="state", diff="parameter-shift")
    with pytest.raises(UsageError, match="has no single final state"):
        uq.Layer(uq.Circuit(1, bits=1).measure(0, 0), output="state")


def test_gradients_that_do_not_fit_are_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100 << 20)
    layer = uq.Layer(uq.Circuit(22).ry(0, uq.weight(0)), "Z0", dtype=torch.complex128)
    monkeypatch.setattr(layer, "run", None)
    with pytest.raises(
        UsageError, match=r"its co-state, for gradients, of 22 wires .* needs 128\.0 MiB .* 4 ranks with"
    ):
        layer()
    state = uq.State(3, dtype=torch.complex128)
    monkeypatch.setattr(memory, "_ALWAYS", 0)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100)
    with pytest.raises(UsageError, match=r"another state \(a co-state or a copy\) of 3 wires"):
        uq.variances(state, "Z0")


def test_second_derivatives_are_refused_and_not_dropped() -> None:
    layer = uq.Layer(uq.Circuit(2).ry(0, uq.weight(0) + uq.feature(0)).cnot(0, 1), ["Z1"], dtype=torch.complex128)
    x = torch.rand(2, 1, dtype=torch.float64, requires_grad=True)
    out = layer(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(UsageError, match="first derivatives only"):
        (out + (slope**2).sum()).backward()


def test_a_layer_can_be_copied() -> None:
    layer = uq.Layer(uq.Circuit(2).ry(0, uq.weight(0)), ["Z0"])
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weights.zero_()
    assert twin().item() == pytest.approx(1.0)
    assert layer.weights.item() != 0


def test_columns_that_no_gate_reads_are_refused() -> None:
    layer = uq.Layer(uq.Circuit(1).ry(0, uq.feature(0)), ["Z0"])
    with pytest.raises(UsageError, match=r"shape \(3, 2\): expected \(batch, 1\)"):
        layer(torch.zeros(3, 2))


def test_expectations_take_what_layers_take() -> None:
    state = uq.simulate(uq.Circuit(2).h(0).cnot(0, 1))
    assert uq.expectations(state, ["Z0 Z1", {"X0 X1": 0.5}]).tolist() == pytest.approx([1.0, 0.5])
    assert uq.expectations(state, "Z0").tolist() == pytest.approx([0.0])


def test_torch_func_is_refused_with_what_to_do() -> None:
    layer = uq.Layer(uq.Circuit(2).ry(0, uq.feature(0)), "Z0", kernel="reference")
    with pytest.raises(UsageError, match=r"torch\.func .* \(batch, features\)"):
        torch.func.vmap(layer)(torch.zeros(3, 1))
    with pytest.raises(UsageError, match="autograd"):
        torch.func.grad(lambda x: layer(x).sum())(torch.zeros(2, 1))


def test_without_numba_the_error_names_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"numba.*quantum"):
        uq.Layer(uq.Circuit(2).ry(0, uq.weight(0)), "Z0")
    monkeypatch.setitem(sys.modules, "numba", None)
    out = uq.Layer(uq.Circuit(2).ry(0, uq.weight(0)), "Z0", weights=[0.0], kernel="reference")()
    assert out.tolist() == [1.0]
