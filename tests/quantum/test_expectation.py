"""Expectation values: right on any number of ranks, and read with few exchanges."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum import dense
from tests.quantum.circuits import random_circuit
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.kernels import pauli_strings
from unisono.quantum.observables.expectation import expectations, pauli_values
from unisono.quantum.observables.measurement_plan import reading
from unisono.quantum.observables.observable import Hermitian, PauliString, PauliSum, Projector, X, Y, Z
from unisono.quantum.state import State

Pools = Callable[[str, int], RankPool]


def random_words(wires: int, count: int, seed: int, weight: int | None = None) -> list[PauliString]:
    """Different words; `weight` letters each, or any number of them."""
    draw = np.random.default_rng(seed)
    words: set[PauliString] = set()
    while len(words) < count:
        if weight is None:
            picked = [(wire, "IXYZ"[draw.integers(4)]) for wire in range(wires)]
        else:
            chosen = sorted(draw.choice(wires, weight, replace=False).tolist())
            picked = [(wire, "XYZ"[draw.integers(3)]) for wire in chosen]
        words.add(tuple((wire, letter) for wire, letter in picked if letter != "I"))
    return sorted(words)


def observables() -> list[PauliSum]:
    draw = np.random.default_rng(1)
    matrix = draw.normal(size=(4, 4)) + 1j * draw.normal(size=(4, 4))
    return [
        Z(0) @ Y(3) - 0.5 * X(6) @ X(0) + 2.0,
        Projector("010", (6, 0, 2)) + Z(1),
        Hermitian(matrix + matrix.conj().T, (5, 0)),
        PauliSum(tuple((float(draw.normal()), word) for word in random_words(7, 60, 2))),
    ]


def read(comm: Any, seed: int, chunk: int, restore: bool) -> tuple[np.ndarray, np.ndarray, bool]:
    state = State(7, comm, chunk=chunk, kernel="reference").run(random_circuit(7, 40, seed))
    layout = state.layout
    values = expectations(state, observables(), restore=restore).numpy()
    return values, state.amplitudes().numpy(), state.layout == layout


@functools.cache
def densely_read(seed: int) -> tuple[np.ndarray, list[float]]:
    vector = dense.state(random_circuit(7, 40, seed))
    return vector, [dense.expectation(vector, each) for each in observables()]


@pytest.mark.parametrize(("backend", "size"), [("none", 1), ("gloo", 4), ("gloo", 8), ("mpi", 2)])
def test_values_equal_the_dense_reference(pools: Pools, backend: str, size: int) -> None:
    for seed, chunk in ((0, 1 << 20), (1, 256)):
        vector, expected = densely_read(seed)
        answers = pools(backend, size).run(read, seed, chunk, True) if size > 1 else [read(None, seed, chunk, True)]
        for values, amplitudes, back in answers:
            np.testing.assert_allclose(values, expected, atol=1e-11)
            np.testing.assert_allclose(amplitudes, vector, atol=1e-12)
            assert back


def read_words(comm: Any, words: list[PauliString]) -> tuple[np.ndarray, int]:
    state = State(8, comm, kernel="reference").run(random_circuit(8, 60, 5))
    plan = reading(words, state.layout, state.global_qubits)
    return pauli_values(state, words, restore=False).numpy(), len(plan.stages)


def test_stages_with_turned_wires_read_the_same(pools: Pools) -> None:
    """Words of few letters, so that stages and not shifts are chosen."""
    words = random_words(8, 120, 3, weight=2)
    vector = dense.state(random_circuit(8, 60, 5))
    expected = [dense.expectation(vector, PauliSum(((1.0, word),))) for word in words]
    for values, stages in pools("gloo", 4).run(read_words, words):
        assert stages > 1
        np.testing.assert_allclose(values, expected, atol=1e-12)


def read_held_words(comm: Any) -> tuple[np.ndarray, list[PauliString]]:
    """Many words that flip a held wire and no other, with Y there: their sums are imaginary."""
    state = State(6, comm, kernel="reference").run(random_circuit(6, 60, 8))
    held, others = state.layout[0], sorted(state.layout[1:])
    words = [tuple(sorted([(held, "Y"), *((wire, "Z") for wire in others[:count])])) for count in range(6)]
    words += [tuple(sorted([(held, "Y"), (wire, "Z")])) for wire in others[1:]]
    return pauli_values(state, words).numpy(), words


def test_words_that_flip_held_wires_only(pools: Pools) -> None:
    vector = dense.state(random_circuit(6, 60, 8))
    for values, read in pools("gloo", 2).run(read_held_words):
        expected = [dense.expectation(vector, PauliSum(((1.0, word),))) for word in read]
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(values, expected, atol=1e-12)


def test_two_thousand_words_on_eight_ranks() -> None:
    layout = tuple(range(20))
    assert reading(random_words(20, 2000, 0), layout, 3).exchanges == 7
    assert reading(random_words(20, 2000, 0, weight=4), layout, 3).exchanges <= 3
    assert reading(random_words(20, 1000, 0, weight=2), layout, 3).exchanges <= 2
    assert reading([((wire, "Z"),) for wire in range(20)], layout, 3).exchanges == 0
    assert reading([tuple((wire, "X") for wire in range(20))], layout, 3).exchanges == 1


def test_a_reading_reads_every_word_once() -> None:
    for weight in (None, 2, 5):
        words = random_words(12, 300, 4, weight)
        for held in (0, 1, 4):
            plan = reading(words, tuple(range(12)), held)
            read = [number for stage in plan.stages for shift in stage.shifts for number in shift.pauli_strings]
            assert sorted(read) == list(range(300))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("bits", [3, 11])
def test_words_fast_and_plain(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int) -> None:
    draw = np.random.default_rng(bits)
    mine, theirs = (torch.from_numpy(draw.normal(size=(2**bits, 2))).to(dtype.to_real()) for _ in range(2))
    mine, theirs = torch.view_as_complex(mine), torch.view_as_complex(theirs)
    signs, flip = draw.integers(0, 2**bits, size=20), int(draw.integers(2**bits))
    factors = draw.normal(size=20) + 1j * draw.normal(size=20)
    index = np.arange(2**bits)
    table = np.array([[(-1) ** int(i & mask).bit_count() for i in index.tolist()] for mask in signs.tolist()])
    expected = table @ (theirs.numpy()[index ^ flip].conj() * mine.numpy())
    added = mine.numpy() + ((factors @ table) * theirs.numpy())[index ^ flip]
    tolerance = 1e-3 if dtype == torch.complex64 else 1e-11
    for fast in (True, False):
        monkeypatch.setattr(pauli_strings, "_fast", lambda _, fast=fast: fast)
        many, few, plain = pauli_strings.pauli_sums(mine, theirs, [(flip, signs), (flip, signs[:3]), (0, signs)])
        np.testing.assert_allclose(many, expected, atol=tolerance)
        np.testing.assert_allclose(few, expected[:3], atol=tolerance)
        np.testing.assert_allclose(plain, table @ (theirs.numpy().conj() * mine.numpy()), atol=tolerance)
        (alike,) = pauli_strings.pauli_sums(mine, mine, [(0, signs)])
        np.testing.assert_allclose(alike, table @ (mine.numpy().conj() * mine.numpy()), atol=tolerance)
        into = mine.clone()
        pauli_strings.add_pauli_strings(into, theirs, [(flip, signs[:8], factors[:8]), (flip, signs[8:], factors[8:])])
        np.testing.assert_allclose(into.numpy(), added, atol=tolerance)


def test_an_observable_on_a_missing_wire_is_refused() -> None:
    with pytest.raises(UsageError, match="wire 4, but the circuit has wires 0 to 2"):
        expectations(State(3).run(Circuit(3).h(0)), [Z(4)])
