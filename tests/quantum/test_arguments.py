"""Arguments of the wrong kind: a clear error, and nothing is allocated or changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import RankPool
from unisono import quantum as uq
from unisono.errors import UsageError
from unisono.quantum.circuit.gates import gate
from unisono.quantum.distributed.program import QuantumProgram

CIRCUIT = uq.Circuit(2).ry(0, uq.weight(0)).rx(1, uq.feature(0)).cx(0, 1)
STATE = uq.State(3)
NAN = float("nan")
ODD: Any = [3, "x", None, 1.5, torch.tensor(2.5), np.zeros((2, 2)), object()]

REFUSED: list[tuple[Callable[[Any], object], list[Any], str]] = [
    (lambda v: uq.Layer(CIRCUIT, "Z0", v), [3, "x", [1]], "expected a communicator"),
    (lambda v: uq.State(2, v), [3, "x"], "expected a communicator"),
    (lambda v: uq.share(v, 2), [3, "x"], "expected a communicator"),
    (lambda v: uq.Layer(v, "Z0"), ODD, "a layer of .* expected a uq.Circuit"),
    (lambda v: uq.Schedule.of(v), ODD, "expected a uq.Circuit"),
    (lambda v: uq.measured(v, 3), ODD, "expected a uq.Circuit"),
    (lambda v: uq.Layer(CIRCUIT, "Z0", dtype=v), [*ODD, torch.float32], "torch.complex64 or torch.complex128"),
    (lambda v: uq.Layer(CIRCUIT, "Z0", device=v), ["meta", "x", 1.5], "'cpu'"),
    (lambda v: uq.Layer(CIRCUIT, "Z0", kernel=v), [3, "x"], "kernel .* expected one of auto"),
    (lambda v: uq.Layer(CIRCUIT, "Z0", seed=v), [-1, 1.5, "x", 1 << 70], "seed=.* expected a whole number"),
    (lambda v: uq.Layer(CIRCUIT, "Z0", weights=[v]), [NAN, float("inf")], "expected finite numbers"),
    (lambda v: uq.Layer(CIRCUIT, "Z0")(torch.tensor([[0.1], [v]])), [NAN], r"at \[1, 0\]: expected finite"),
    (lambda v: uq.Layer(CIRCUIT, v), [np.array(3), torch.tensor(2.5), 3], "expected one or several observables"),
    (lambda v: uq.State(2).run(uq.Schedule.of(CIRCUIT), [v], [0.1]), [NAN], r"weights\[0\] is nan"),
    (lambda v: uq.expectations(v, "Z0"), ODD, "expectations of .* expected a uq.State"),
    (lambda v: uq.density(v, [0]), ODD, "density of .* expected a uq.State"),
    (lambda v: uq.amplitudes(STATE, v), [3, "000", None], "expected a list of strings"),
    (lambda v: uq.counts(v), [3, [[0, 2]], [[1], [0, 1]], [[0.5]]], "as samples gives"),
    (lambda v: uq.save(v, "nowhere"), ODD, "save of .* expected a uq.State"),
    (lambda v: uq.save(STATE, v), [3, None, ""], "expected the path of a folder"),
    (lambda v: uq.load(v), [3, None, ""], "expected the path of a folder"),
    (lambda v: STATE.axis(v), [3, -1, "x", True], "the state has wires 0 to 2"),
    (lambda v: uq.Circuit(v), [0, 1.5, "x", None, True, torch.tensor(True), 10**30], "number of wires of 1 to"),
    (lambda v: uq.Circuit(3).cnot_line(v), [3, torch.tensor(2.5)], "expected several wires"),
    (lambda v: uq.Circuit(3).pauli_rotation(v, [0, 1], 0.1), [3, None, "XQ", "X"], "Pauli string"),
    (lambda v: uq.Circuit(3).apply("x", 0, controls=v), [3, "x", None], "expected wires, or a mapping"),
    (lambda v: uq.Circuit(3).apply("x", 0, controls={1: v}), [2, "x", 0.5], "expected 0 or 1"),
    (lambda v: uq.Circuit(3).apply(v, 0), [3, None], "expected a gate's name"),
    (lambda v: uq.Circuit(3).append(v), [3, "x", None], "expected an Operation"),
    (lambda v: uq.Circuit(3).append(uq.Operation(gate("x"), v)), [0, [0], None], "expected a tuple"),
    (lambda v: uq.Circuit(3).append(uq.Operation(gate("rx"), (0,), (), (v,))), [0.5, None], "expected an Affine"),
    (lambda v: uq.Affine(v), [NAN, None, "x", 10**400], "expected a finite real number"),
    (lambda v: uq.weight(0) / v, [0, 0.0], "not zero"),
    (lambda v: uq.Z(0) / v, [0, 0.0], "not zero"),
    (lambda v: uq.Z(v), [-1, 1.5, (0, 1), True], "expected"),
    (lambda v: uq.Hermitian(v, 0), [None, "x", [[1], [2, 3]], 3], "Hermitian"),
    (lambda v: uq.PauliSum(((v, ()),)).check(2), [NAN, "x", None], "finite coefficients"),
    (lambda v: uq.maxcut(v), [3, "x", np.array(3)], "expected pairs of wires"),
    (lambda v: uq.hardware_efficient(2, 10**30), [None], "at most"),
    (lambda v: uq.from_qasm(v), [3, None, b"x"], "expected a text"),
    (lambda v: uq.load_qasm(v), [3, None], "expected the path"),
    (lambda v: CIRCUIT + v, ODD, r"a circuit \+ .* expected another Circuit"),
    (lambda v: CIRCUIT * v, [3, None, 1.5], r"a circuit \* .* joined with \+ or compose"),
    (lambda v: v * CIRCUIT, [3, None, 1.5], r"a circuit \* .* joined with \+ or compose"),
    (lambda v: v / uq.Z(0), [3, "x", None], r"an observable cannot divide"),
    (lambda v: v @ uq.Z(0), [3, "x", None], r"@ .*expected another observable"),
    (lambda v: v + CIRCUIT, [3, "x", None, 1.5, [1]], r"\+ a circuit: expected another Circuit"),
    (lambda v: uq.State(3).do(v), ODD, "do of .* expected a step of a Program"),
    (lambda v: uq.State(3).apply(v), [*ODD, CIRCUIT], "apply of .* expected a Run"),
    (lambda v: uq.State(3).exchange(v), ODD, "exchange of .* expected a LocalExchange"),
    (lambda v: QuantumProgram.of(v), [*ODD, CIRCUIT], "expected a Schedule"),
    (lambda v: uq.Layer(CIRCUIT, "Z0", batch_axis=v), [3, None, ["dp"]], "batch_axis=.* name of an axis"),
    (lambda v: uq.Layer(CIRCUIT, "Z0", state_axis=v), ["dp", "x", ""], "state_axis=.* without a mesh"),
    (lambda v: uq.Schedule.of(CIRCUIT).describe(rates=v), [0, 3, "x", []], "rates=.* expected Rates"),
    (lambda v: uq.weight(0) + v, ["x", "1", None, [1], 1j, object()], "expected one real number"),
    (lambda v: uq.weight(0) * v, ["x", "1", None, [1], 1j, b"1"], "expected one real number"),
    (lambda v: v - uq.weight(0), ["x", None, [1], 1j], "expected one real number"),
    (lambda v: v / uq.weight(0), [1, 2.5, uq.weight(1)], "not affine"),
    (lambda v: uq.I(v), [-1, 1.5, "x", None, (0, 1)], "expected"),
    (lambda v: uq.Hermitian(np.eye(2), v), [b"x", {0: 1}, {0}, "0"], "expected a wire of 0 or more"),
    (lambda v: uq.probabilities(STATE, v), ["", b"", {0: 1}, {0, 1}], "expected one wire or several"),
    (lambda v: uq.density(STATE, v), ["", {0: 1}], "expected one wire or several"),
    (lambda v: uq.Circuit(3).qft(v), ["", {0: 1}, {0, 1}], "expected several wires"),
    (lambda v: uq.Circuit(3).qft(swaps=v), [1, "no", None, np.zeros(2)], "expected True or False"),
    (lambda v: uq.counts(v), [torch.ones(2, 2, requires_grad=True)], "as samples gives"),
]


@pytest.mark.parametrize(("make", "given", "message"), REFUSED)
def test_refused(make: Callable[[Any], object], given: list[Any], message: str) -> None:
    for each in given:
        with pytest.raises(UsageError, match=message):
            make(each)


def test_what_is_refused_leaves_a_circuit_as_it_was() -> None:
    circuit = uq.Circuit(3).h(0)
    other = uq.Circuit(2, bits=4).x(0).measure(1, 3)
    for refused in (
        lambda: circuit.measure(7, 9),
        lambda: circuit.compose(other, (0, 5)),
        lambda: circuit.compose(other, (0, 1), controls=[2]),
        lambda: circuit.qft([0, 1, 0]),
        lambda: circuit.cnot_line([0, 1, 2, 2]),
        lambda: circuit.cnot_ring([0, 1, 2, 0]),
    ):
        with pytest.raises(UsageError):
            refused()
    assert circuit == uq.Circuit(3).h(0)


def wide_gate(comm: Any) -> list[np.ndarray]:
    """On four ranks a gate that mixes both wires: each rank keeps both, and groups share the samples."""
    layer = uq.Layer(uq.Circuit(2).rxx(0, 1, uq.weight(0)).ry(0, uq.feature(0)), "Z0", comm, dtype=torch.complex128)
    found = []
    for size in (1, 2, 5):
        x = torch.linspace(0, 1, size, dtype=torch.float64)[:, None].requires_grad_()
        layer(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad.numpy())
    assert layer.weights.grad is not None
    return [*found, layer.weights.grad.numpy()]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*ranks")
def test_a_layer_keeps_as_many_wires_a_rank_as_its_gates_mix(pools: Callable[[str, int], RankPool]) -> None:
    alone = wide_gate(None)
    for answer in pools("gloo", 4).run(wide_gate):
        for found, expected in zip(answer, alone, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-12)
