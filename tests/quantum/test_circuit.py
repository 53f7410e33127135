"""Circuits: what their methods add, composition, inverses, and what they refuse."""

from __future__ import annotations

import gc
import math
import pickle
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quantum import dense
from tests.quantum.circuits import random_circuit
from unisono import quantum as uq
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.parameter import Affine

SEEDS = st.integers(0, 2**32 - 1)


def test_methods_add_what_they_say() -> None:
    c = Circuit(3)
    c.id(0).x(0).y(1).z(2).h(0).s(1).sdg(2).t(0).tdg(1).sx(2).sxdg(0)
    c.rx(0, 0.1).ry(1, 0.2).rz(2, 0.3).p(0, 0.4).u1(1, 0.5).u2(0, 0.6, 0.7).u3(1, 0.8, 0.9, 1).rot(2, 1.1, 1.2, 1.3)
    c.cnot(0, 1).cx(0, 1).cy(1, 2).cz(0, 2).ch(0, 2).swap(0, 1).iswap(1, 2).cswap(0, 1, 2).toffoli(2, 1, 0)
    c.crx(0, 1, 1.4).cry(0, 1, 1.5).crz(0, 1, 1.6).cphase(0, 1, 1.7).cu3(0, 1, 1.8, 1.9, 2)
    c.rxx(0, 1, 2.1).ryy(0, 1, 2.2).rzz(0, 1, 2.3).rzx(0, 1, 2.4).pauli_rotation("XIY", (0, 1, 2), 2.5)
    c.global_phase(2.6).barrier()
    counts = c.counts()
    assert counts["cx"] == 2
    assert counts["ccx"] == counts["cswap"] == counts["cu3"] == counts["pauli_rotation"] == 1
    assert counts["p"] == 2
    assert sum(counts.values()) == len(c) == len(c.operations) == 40
    (rotation,) = (each for each in c.operations if each.name == "pauli_rotation")
    assert rotation.targets == (0, 2)
    assert [each.parameters[0].constant for each in c.operations if each.name == "rzx"] == [2.4]


def test_first_wire_is_most_significant() -> None:
    assert np.argmax(np.abs(dense.state(Circuit(3).x(0)))) == 0b100
    assert np.argmax(np.abs(dense.state(Circuit(3).x(2)))) == 0b001
    toggled = Circuit(3).apply("x", 1, controls={0: 0, 2: 0})
    assert np.argmax(np.abs(dense.state(toggled))) == 0b010


def test_qft_is_the_fourier_matrix() -> None:
    n = 4
    index = np.arange(2**n)
    fourier = np.exp(2j * math.pi * np.outer(index, index) / 2**n) / 2 ** (n / 2)
    assert np.allclose(dense.unitary(Circuit(n).qft()), fourier)
    part = Circuit(n).qft(wires=(2, 0))
    assert np.allclose(dense.unitary(part), dense.expanded(fourier_of(2), (2, 0), n))
    assert Circuit(n).qft(swaps=False).counts() == {"h": 4, "cp": 6}


def fourier_of(n: int) -> np.ndarray:
    index = np.arange(2**n)
    return np.exp(2j * math.pi * np.outer(index, index) / 2**n) / 2 ** (n / 2)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 4), seed=SEEDS)
def test_inverse_undoes(n: int, seed: int) -> None:
    circuit = random_circuit(n, 12, seed, weights=3, features=2)
    weights, features = np.random.default_rng(seed).normal(size=(2, 3))
    full = dense.unitary(circuit + circuit.inverse(), weights, features)
    assert np.allclose(full, np.eye(2**n), atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 3), seed=SEEDS)
def test_compose_places_and_controls(n: int, seed: int) -> None:
    circuit = random_circuit(n, 8, seed, weights=2)
    weights = np.random.default_rng(seed).normal(size=2)
    wires = np.random.default_rng(seed).permutation(n + 1).tolist()
    inner = dense.unitary(circuit, weights)
    placed = Circuit(n + 1).compose(circuit, wires=wires[:n])
    assert np.allclose(dense.unitary(placed, weights), dense.expanded(inner, wires[:n], n + 1), atol=1e-12)
    controlled = Circuit(n + 1).compose(circuit, wires=wires[:n], controls={wires[n]: 0})
    both = np.kron(np.diag([1, 0]), inner) + np.kron(np.diag([0, 1]), np.eye(2**n))
    expected = dense.expanded(both, [wires[n], *wires[:n]], n + 1)
    assert np.allclose(dense.unitary(controlled, weights), expected, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_bound_shifted_and_travelled(seed: int) -> None:
    circuit = random_circuit(3, 10, seed, weights=3, features=2)
    weights, features = np.random.default_rng(seed).normal(size=(2, 3))
    expected = dense.state(circuit, weights, features)
    bound = circuit.bound(weights[: circuit.weights], features[: circuit.features])
    assert (bound.weights, bound.features) == (0, 0)
    assert np.allclose(dense.state(bound), expected, atol=1e-12)
    moved = circuit.shifted(weights=2, features=1)
    assert np.allclose(dense.state(moved, [9, 9, *weights], [9, *features]), expected, atol=1e-12)
    assert pickle.loads(pickle.dumps(circuit)) == circuit


def test_depth() -> None:
    assert Circuit(3).depth() == 0
    assert Circuit(3).h(0).h(1).h(2).depth() == 1
    assert Circuit(3).h(0).cnot(0, 1).cnot(1, 2).depth() == 3
    assert Circuit(2).h(0).barrier().h(1).depth() == 2
    assert Circuit(2).h(0).global_phase(1).h(1).depth() == 1


def test_weights_and_features_are_counted() -> None:
    circuit = Circuit(2).rx(0, 2 * uq.weight(4) - uq.feature(1)).rz(1, uq.weight(0))
    assert (circuit.weights, circuit.features) == (5, 2)
    assert repr(circuit) == "Circuit(2 wires, 2 operations, 5 weights, 2 features)"


def test_rings_and_lines() -> None:
    assert [each.wires for each in Circuit(3).cnot_ring().operations] == [(0, 1), (1, 2), (2, 0)]
    assert len(Circuit(2).cnot_ring()) == 1
    assert [each.wires for each in Circuit(4).cnot_line((3, 1)).operations] == [(3, 1)]


def test_affine_algebra() -> None:
    w, x = uq.weight, uq.feature
    angle = 2 * w(1) - x(0) / 4 + 0.5 - (w(1) + w(0))
    assert angle == Affine(0.5, ((0, -1.0), (1, 1.0)), ((0, -0.25),))
    assert angle.evaluate([1.0, 2.0], [4.0]) == 0.5
    assert 1 - w(0) == Affine(1.0, ((0, -1.0),))
    assert w(0) - w(0) == Affine()
    assert (np.float64(3) * w(2)).weights == ((2, 3.0),)
    assert str(-w(3) + 2 * x(1) + 1) == "-w3+2*x1+1"
    assert str(Affine()) == "0"
    assert angle.evaluate(torch.tensor([1.0, 2.0]), torch.tensor([4.0])).item() == 0.5
    assert w(0).evaluate(np.array([[1.0, 2.0]])).tolist() == [1.0, 2.0]


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Circuit(0), r"Circuit\(0\)"),
    (lambda: Circuit(2.5), r"Circuit\(2.5\)"),  # type: ignore[arg-type]
    (lambda: Circuit(2).x(2), "x on wire 2: the circuit has wires 0 to 1"),
    (lambda: Circuit(2).x(-1), "wire -1"),
    (lambda: Circuit(2).x("0"), "wire '0'"),  # type: ignore[arg-type]
    (lambda: Circuit(2).cnot(1, 1), "names a wire twice"),
    (lambda: Circuit(2).apply("x", 0, controls={0: 1}), "names a wire twice"),
    (lambda: Circuit(2).apply("x", 0, controls={1: 2}), "value 2 of 1: expected 0 or 1"),
    (lambda: Circuit(2).apply("rx", 0), "rx takes 1 angles, but got 0"),
    (lambda: Circuit(2).apply("rx", 0, 1, 2), "rx takes 1 angles, but got 2"),
    (lambda: Circuit(2).apply("swap", 0), "swap acts on 2 wires, but got 1"),
    (lambda: Circuit(2).apply("gphase", 0, 1.0), "gphase acts on 0 wires"),
    (lambda: Circuit(2).apply("nothing", 0), "'nothing' is not known"),
    (lambda: Circuit(2).unitary(np.eye(4), 0), "unitary acts on 2 wires"),
    (lambda: Circuit(2).unitary([[1, 1], [1, 1]], 0), "not unitary"),
    (lambda: Circuit(2).rx(0, "a"), "angle 'a'"),  # type: ignore[arg-type]
    (lambda: Circuit(2).rx(0, float("inf")), "not finite"),
    (lambda: Circuit(2).rx(0, 1j), "expected one real number"),  # type: ignore[arg-type]
    (lambda: Circuit(2).rx(0, torch.ones(1, requires_grad=True)), "weight"),
    (lambda: Circuit(2).pauli_rotation("XQ", (0, 1), 1), "'XQ' on 2 wires"),
    (lambda: Circuit(2).pauli_rotation("X", (0, 1), 1), "'X' on 2 wires"),
    (lambda: uq.weight(-1), r"weight\(-1\)"),
    (lambda: uq.feature(1.5), r"feature\(1.5\)"),  # type: ignore[arg-type]
    (lambda: uq.weight(0) * uq.weight(1), "not affine"),
    (lambda: Circuit(1) + Circuit(2), "2 wires to one of 1"),
    (lambda: Circuit(3).compose(Circuit(2), wires=(0,)), "2 wires to map"),
    (lambda: Circuit(3).compose(Circuit(2).h(1), wires=(0, 7)), "different wires of 0 to 2"),
    (lambda: Circuit(2).measure(0).inverse(), "measure has no inverse"),
    (lambda: Circuit(3).compose(Circuit(2).measure(0), controls=(2,)), "cannot be controlled"),
    (lambda: Circuit(2).apply("x", 0, condition={0: 1}), "uses bit 0, but the circuit has 0"),
    (lambda: Circuit(2, bits=1).apply("x", 0, condition={0: 1}).inverse(), "depends on a measured bit"),
    (lambda: Circuit(2).measure(0, -1), "bit -1"),
    (lambda: Circuit(2).rx(0, uq.weight(3)).bound([1.0, 2.0]), "reads 4 weights, but 2 were given"),
    (lambda: Circuit(3).compose(Circuit(2).h(0), wires=(0, 0)), r"2 \(0, 0\): expected different wires of 0 to 2"),
    (lambda: Circuit(2).h(1.0), "wire 1.0: expected a number"),  # type: ignore[arg-type]
    (lambda: Circuit(2, bits=-1), r"bits=-1\): expected a number of classical bits"),
    (lambda: uq.Z(1.5), r"Z\(1.5\): expected"),  # type: ignore[arg-type]
    (lambda: uq.Layer(Circuit(2), "1e999 Z0"), "expected a finite real number"),
    (lambda: uq.State(2.5), r"State\(2.5\): expected a number of wires"),  # type: ignore[arg-type]
    (lambda: uq.State(2, chunk=0), "chunk=0: expected bytes"),
    (
        lambda: uq.Layer(Circuit(1).rx(0, uq.feature(0)), "Z0")(torch.ones(1, 1, dtype=torch.complex64)),
        "input of type torch.complex64: expected a tensor of real numbers",
    ),
    (lambda: Circuit(2).rx(0, uq.feature(0)).bound(), "reads 1 features, but 0 were given"),
    (lambda: uq.State(2).run(Circuit(2).rx(0, uq.weight(0)), [1.0, 2.0]), "reads 1 weights, but 2 were given"),
    (lambda: uq.simulate(Circuit(2).h(0), features=[1.0]), "reads 0 features, but 1 were given"),
    (
        lambda: uq.State(2).run(uq.Schedule.of(Circuit(2).rx(0, uq.weight(3))), [1.0]),
        "reads 4 weights, but 1 were given",
    ),
    (lambda: uq.simulate(Circuit(1).rx(0, uq.weight(0)), 0.5), r"weights of shape \(\): expected a vector of 1"),
    (lambda: uq.simulate(Circuit(1).rx(0, uq.weight(0)), [[0.5]]), r"weights of shape \(1, 1\)"),
    (lambda: uq.simulate(Circuit(1).rx(0, uq.weight(0)), [1j]), "expected a vector of 1 real numbers"),
    (lambda: uq.simulate(Circuit(1).rx(0, uq.weight(0)), [float("nan")]), r"weights\[0\] is nan"),
    (lambda: uq.simulate(Circuit(1).rx(0, uq.weight(0)), torch.ones(1, requires_grad=True)), r"weights\.detach\(\)"),
    (lambda: Circuit(2).cnot(torch.tensor(1), torch.tensor(1)), "names a wire twice"),  # type: ignore[arg-type]
    (lambda: Circuit(2).h(torch.tensor(0.5)), r"wire tensor\(0.5000\): expected a number"),  # type: ignore[arg-type]
    (lambda: Circuit(2, bits=1).apply("measure", 0), r"use circuit\.measure\(wire, bit\)"),
    (lambda: Circuit(2).apply("reset", 0, controls=[1]), "cannot be controlled"),
    (lambda: uq.State(2, seed=-1), "seed=-1: expected a whole number"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_integers_of_other_libraries_are_wires_and_values() -> None:
    plain = Circuit(3, bits=1).cnot(0, 2).apply("x", 1, controls={0: 1}, condition={0: 1})
    one, zero, two = np.int64(1), torch.tensor(0), np.uint8(2)
    mixed = Circuit(3, bits=1).apply("cx", (zero, two))  # type: ignore[arg-type]
    mixed.apply("x", one, controls={zero: True}, condition={zero: one})  # type: ignore[dict-item]
    assert mixed == plain
    assert mixed.to_qasm() == plain.to_qasm()


@pytest.mark.thorough
def test_matrices_typed_with_seven_digits_keep_the_norm() -> None:
    """They pass as unitary, and must stay so to the precision to which norms are checked."""
    rounded = np.round(np.kron([[1, 1], [1, -1]], [[1, 1], [1, -1]]) / 2 + 2e-7, 7)
    circuit = Circuit(2)
    for _ in range(40):
        circuit.unitary(rounded, (0, 1)).diagonal([1, 1 + 5e-7], 0)
    for kernel in ("cpu", "reference"):
        assert uq.State(2, kernel=kernel).run(circuit).norm() == pytest.approx(1, abs=1e-12)
    assert np.abs(circuit.operations[0].matrix() - rounded).max() < 1e-6


def test_measurement_and_conditions() -> None:
    circuit = Circuit(2).h(0).measure(0).apply("x", 1, condition={0: 1}).reset(0).measure(1)
    assert circuit.bits == 2
    assert not circuit.is_unitary
    assert Circuit(2).h(0).barrier().is_unitary
    courses = dense.branches(circuit)
    assert {(round(chance, 9), bits) for chance, bits, _ in courses} == {(0.5, (0, 0)), (0.5, (1, 1))}


def test_gates_have_the_names_of_their_methods() -> None:
    by_name = Circuit(2).apply("u1", 0, 0.1).apply("phase", 1, 0.2).apply("cphase", (0, 1), 0.3)
    by_name.apply("global_phase", (), 0.4)
    assert by_name == Circuit(2).u1(0, 0.1).phase(1, 0.2).cphase(0, 1, 0.3).global_phase(0.4)


def test_operations_are_a_sequence_in_small_shards() -> None:
    circuit = random_circuit(4, 150, seed=3, arrays=False)
    operations, plain = circuit.operations, tuple(circuit.operations)
    assert len(operations) == len(plain) == len(circuit) == 150
    assert operations == plain
    assert operations == circuit.copy().operations != Circuit(4).operations
    assert hash(operations) == hash(plain)
    assert [operations[place] for place in (0, 55, 56, 149, -1, -150)] == [plain[i] for i in (0, 55, 56, 149, -1, 0)]
    assert operations[40:120:3] == plain[40:120:3]
    assert [*reversed(operations)] == [*plain[::-1]]
    assert pickle.loads(pickle.dumps(operations)) == operations
    for place in (150, -151):
        with pytest.raises(IndexError):
            operations[place]
    kept = [operations, *gc.get_referents(operations)]
    kept += [shard for each in kept[1:] if isinstance(each, tuple) for shard in each]
    assert all(sys.getsizeof(each) <= 512 for each in kept if isinstance(each, tuple))
