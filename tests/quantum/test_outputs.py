"""What is read off states: against the dense reference, and the same for 1, 2 and 4 ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum import dense
from tests.quantum.circuits import random_circuit
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.quantum import outputs
from unisono.quantum import shots as shots_module
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.templates import hardware_efficient
from unisono.quantum.observables.application import applied
from unisono.quantum.observables.observable import Hermitian, PauliSum, Projector, X, Y, Z, observable
from unisono.quantum.outputs import simulate
from unisono.quantum.shots import final_measurements, measured

Pools = Callable[[str, int], RankPool]
N = 6
WIRES = [(0,), (5, 2), (3, 0, 4), (1, 0), (2, 3, 4, 5, 0), (0, 1, 2, 3, 4, 5)]


def sums() -> list[PauliSum]:
    draw = np.random.default_rng(2)
    array = draw.normal(size=(4, 4)) + 1j * draw.normal(size=(4, 4))
    return [
        Z(0),
        X(0) @ Y(5) - 0.5 * Z(1) @ X(2) + 0.25,
        sum((X(wire) @ Y((wire + 1) % N) for wire in range(N)), start=0 * Z(0)),
        Hermitian(array + array.conj().T, (4, 0)) - 2 * X(3),
        Projector("101", (0, 3, 5)) + 0.3 * X(0),
    ]


def read_all(comm: Any, seed: int) -> dict[str, Any]:
    circuit = random_circuit(N, 40, seed, weights=2)
    state = simulate(circuit, (0.3, -0.8), comm=comm, chunk=1024)
    before = state.amplitudes()
    found = {
        "applied": [applied(state, each).amplitudes().numpy() for each in sums()],
        "variances": outputs.variances(state, sums()).numpy(),
        "probabilities": [outputs.probabilities(state, wires).numpy() for wires in WIRES],
        "density": [outputs.density(state, wires).numpy() for wires in WIRES[:-1]],
        "amplitudes": outputs.amplitudes(state, ["010101", "111111", "000000", "100000"]).numpy(),
        "shard": outputs.shard(state).numpy(),
        "fidelity": outputs.fidelity(state, simulate(random_circuit(N, 40, seed + 1), comm=comm)),
        "itself": outputs.fidelity(state, torch.from_numpy(dense.state(circuit, (0.3, -0.8)))),
    }
    assert torch.equal(state.amplitudes(), before), "reading changed the state"
    return found


@pytest.mark.parametrize(("size", "seed"), [(1, 0), (2, 0), (4, 7)])
def test_outputs_equal_the_dense_reference(pools: Pools, size: int, seed: int) -> None:
    vector = dense.state(random_circuit(N, 40, seed, weights=2), (0.3, -0.8))
    other = dense.state(random_circuit(N, 40, seed + 1))
    shards = []
    for answer in pools("gloo", size).run(read_all, seed) if size > 1 else [read_all(None, seed)]:
        for each, made, variance in zip(sums(), answer["applied"], answer["variances"], strict=True):
            np.testing.assert_allclose(made, dense.observable_matrix(each, N) @ vector, atol=1e-12)
            np.testing.assert_allclose(variance, dense.variance(vector, each), atol=1e-11)
        for wires, chances in zip(WIRES, answer["probabilities"], strict=True):
            np.testing.assert_allclose(chances, dense.probabilities(vector, wires), atol=1e-13)
        for wires, matrix in zip(WIRES, answer["density"], strict=False):
            np.testing.assert_allclose(matrix, dense.reduced(vector, wires), atol=1e-13)
        np.testing.assert_allclose(answer["amplitudes"], vector[[0b010101, 0b111111, 0, 0b100000]], atol=1e-13)
        assert answer["fidelity"] == pytest.approx(abs(np.vdot(vector, other)) ** 2, abs=1e-12)
        assert answer["itself"] == pytest.approx(1, abs=1e-12)
        shards.append(answer["shard"])
    np.testing.assert_allclose(np.concatenate(shards), vector, atol=1e-13)


def read_samples(comm: Any) -> list[np.ndarray]:
    state = simulate(random_circuit(N, 40, seed=3), comm=comm)
    return [outputs.samples(state, 200, seed=4, wires=wires).numpy() for wires in WIRES]


def test_samples_do_not_depend_on_the_number_of_ranks(pools: Pools) -> None:
    answers = [read_samples(None), *(each for size in (2, 4) for each in pools("gloo", size).run(read_samples))]
    for answer in answers[1:]:
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(answer, answers[0], strict=True))


def test_samples_follow_the_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    circuit = random_circuit(5, 30, seed=11)
    state = simulate(circuit)
    expected = dense.probabilities(dense.state(circuit), (3, 1, 0, 2))
    shots = 40_000
    for first, following in ((16, 8), (1, 1), (2, 2)):  # all wires at once, and in groups that build on each other
        monkeypatch.setattr(outputs, "_FIRST", first)
        monkeypatch.setattr(outputs, "_NEXT", following)
        read = outputs.samples(state, shots, seed=5, wires=(3, 1, 0, 2)).numpy()
        found = np.bincount(read @ [8, 4, 2, 1], minlength=16)
        deviation = np.sqrt(shots * expected * (1 - expected)) + 1e-9
        assert np.all(np.abs(found - shots * expected) < 5 * deviation)
        assert not np.any(found[expected < 1e-15])
    assert torch.equal(outputs.samples(state, 50, seed=1), outputs.samples(state, 50, seed=1))
    assert not torch.equal(outputs.samples(state, 50, seed=1), outputs.samples(state, 50, seed=2))


def test_counts() -> None:
    read = outputs.samples(simulate(Circuit(3).h(0).cnot(0, 1).cnot(1, 2)), 1000, seed=3)
    counts = outputs.counts(read)
    assert set(counts) == {"000", "111"}
    assert sum(counts.values()) == 1000
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    assert outputs.samples(simulate(Circuit(2)), 0).shape == (0, 2)


def test_large_states_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "_PART", 3)
    circuit = random_circuit(N, 30, seed=4)
    state, vector = simulate(circuit), dense.state(circuit)
    for wires in WIRES:
        np.testing.assert_allclose(outputs.probabilities(state, wires), dense.probabilities(vector, wires), atol=1e-13)
        np.testing.assert_allclose(outputs.density(state, wires), dense.reduced(vector, wires), atol=1e-13)


def test_variances_and_overlaps_lose_nothing_to_large_numbers_or_single_precision() -> None:
    circuit = Circuit(20)
    for wire in range(20):
        circuit.ry(wire, 0.3 + wire)
    single, double = (simulate(circuit, dtype=dtype) for dtype in (torch.complex64, torch.complex128))
    weight = single.local.to(torch.complex128).norm().item() ** 2
    assert outputs.fidelity(single, single) == pytest.approx(weight**2, abs=1e-10)
    assert outputs.fidelity(single, double) == pytest.approx(1, abs=1e-5)
    expected = np.sin(0.3) ** 2
    assert outputs.variances(single, 1000 + Z(0)).item() == pytest.approx(expected, abs=1e-4)
    assert outputs.variances(double, 1e8 + Z(0)).item() == pytest.approx(expected, abs=1e-6)


def test_single_precision() -> None:
    circuit = hardware_efficient(4, 3)
    weights = np.linspace(0, 3, circuit.weights)
    state, vector = simulate(circuit, weights, dtype=torch.complex64), dense.state(circuit, weights)
    np.testing.assert_allclose(outputs.probabilities(state), np.abs(vector) ** 2, atol=1e-6)
    np.testing.assert_allclose(
        outputs.variances(state, "Z0 X1")[0], dense.variance(vector, observable("Z0 X1")), atol=1e-5
    )


# Circuits with measurements -------------------------------------------------------------------------------------------


def teleport() -> Circuit:
    """Wire 0's state goes to wire 2, is undone there, and bit 2 is always 0."""
    circuit = Circuit(3).u3(0, 0.7, 0.4, -1.1).h(1).cnot(1, 2).cnot(0, 1).h(0)
    circuit.measure(0, 0).measure(1, 1).apply("x", 2, condition={1: 1}).apply("z", 2, condition={0: 1})
    return circuit.u3(2, -0.7, 1.1, -0.4).measure(2, 2)


def again() -> Circuit:
    """A wire is measured, reset, and used again."""
    return (
        Circuit(4).h(3).cnot(3, 2).ry(0, 1.0).measure(0, 0).reset(0).ry(0, 2.0).cnot(0, 1).measure(1, 1).measure(0, 2)
    )


def read_bits(comm: Any) -> list[np.ndarray]:
    return [measured(circuit, 30, comm=comm, seed=9).numpy() for circuit in (teleport(), again())]


def test_courses_do_not_depend_on_the_number_of_ranks(pools: Pools) -> None:
    answers = [read_bits(None), *(each for size in (2, 4) for each in pools("gloo", size).run(read_bits))]
    for answer in answers:
        assert all(np.array_equal(a, b) for a, b in zip(answer, answers[0], strict=True))
        assert not answer[0][:, 2].any()
        assert np.array_equal(answer[1][:, 1], answer[1][:, 2])


@pytest.mark.parametrize("circuit", [teleport(), again()], ids=["teleport", "again"])
def test_courses_follow_the_branches(circuit: Circuit) -> None:
    shots = 400
    found = Counter(map(tuple, measured(circuit, shots, seed=1).tolist()))
    expected: Counter[tuple[int, ...]] = Counter()
    for chance, bits, _ in dense.branches(circuit):
        expected[bits] += chance  # type: ignore[assignment]
    assert set(found) <= set(expected)
    for bits, chance in expected.items():
        assert abs(found[bits] - shots * chance) < 5 * np.sqrt(shots * chance * (1 - chance)) + 1e-6


def test_shots_together_read_what_they_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    circuits = [teleport(), again()]
    together = [measured(circuit, 40, seed=3) for circuit in circuits]
    monkeypatch.setattr(shots_module, "_AT_ONCE", 0)
    for circuit, found in zip(circuits, together, strict=True):
        assert torch.equal(measured(circuit, 40, seed=3), found)


def test_final_measurements_are_sampled_at_once() -> None:
    circuit = Circuit(3).h(0).cnot(0, 2).measure(2, 0).x(1).barrier().measure(0, 3).measure(1, 1)
    plain, wires = final_measurements(circuit)
    assert plain is not None
    assert plain.counts() == {"h": 1, "cx": 1, "x": 1}
    assert wires == {0: 2, 3: 0, 1: 1}
    read = measured(circuit, 100, seed=2)
    assert read.shape == (100, 4)
    assert torch.equal(read[:, 0], read[:, 3])
    assert bool(read[:, 1].all())
    assert not read[:, 2].any()
    assert final_measurements(Circuit(1).measure(0).x(0))[0] is None
    assert final_measurements(Circuit(1).reset(0).measure(0))[0] is None


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: outputs.probabilities(simulate(Circuit(2)), (0, 2)), "expected different wires of 0 to 1"),
    (lambda: outputs.probabilities(simulate(Circuit(2)), (0, 0)), "expected different wires"),
    (lambda: outputs.density(simulate(Circuit(12)), range(11)), "at most 10"),
    (lambda: outputs.samples(simulate(Circuit(2)), -1), "-1 shots"),
    (lambda: outputs.amplitudes(simulate(Circuit(2)), ["012"]), "'012': expected 2 characters"),
    (lambda: outputs.variances(simulate(Circuit(2)), "Z5"), "acts on wire 5"),
    (lambda: outputs.fidelity(simulate(Circuit(2)), simulate(Circuit(3))), "2 and 3 wires"),
    (lambda: outputs.fidelity(simulate(Circuit(2)), torch.zeros(3)), r"\(3,\)"),
    (lambda: measured(Circuit(2).h(0), 10), "measures nothing"),
    (lambda: simulate(hardware_efficient(2, 1), [0.1]), "reads 4 weights, but 1 were given"),
    (lambda: outputs.samples(simulate(Circuit(2)), 2.5), "2.5 shots"),  # type: ignore[arg-type]
    (lambda: outputs.samples(simulate(Circuit(2)), 5, seed=-1), "seed=-1"),
    (lambda: measured(again(), -1), "-1 shots"),
    (lambda: outputs.probabilities(simulate(Circuit(2)), (0.5,)), "expected different wires"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_what_a_user_may_pass_loosely() -> None:
    state = simulate(Circuit(2).h(0))
    vector = np.array([1, 0, 1, 0]) / np.sqrt(2)
    assert outputs.fidelity(state, vector) == pytest.approx(1.0)
    assert outputs.probabilities(state, 0).tolist() == pytest.approx([0.5, 0.5])
    with pytest.raises(UsageError, match="expected a State first"):
        outputs.overlap(vector, state)
    with pytest.raises(UsageError, match="basis state 3: expected 2 characters"):
        outputs.amplitudes(state, [3])
