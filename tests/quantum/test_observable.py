"""Observables: their algebra and spellings against dense matrices, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quantum import dense
from unisono.errors import UsageError
from unisono.quantum.observables.observable import (
    Hermitian,
    I,
    PauliSum,
    Projector,
    X,
    Y,
    Z,
    multiply,
    observable,
    observables,
)

N = 3
WORDS = st.lists(st.sampled_from("IXYZ"), min_size=N, max_size=N)


def matrix(given: PauliSum) -> np.ndarray:
    return dense.observable_matrix(given, N)


def word_of(letters: list[str]) -> tuple[tuple[int, str], ...]:
    return tuple((wire, letter) for wire, letter in enumerate(letters) if letter != "I")


@settings(max_examples=50, deadline=None)
@given(left=WORDS, right=WORDS)
def test_products_of_words(left: list[str], right: list[str]) -> None:
    factor, word = multiply(word_of(left), word_of(right))
    first, second = (matrix(PauliSum(((1.0, word_of(letters)),))) for letters in (left, right))
    assert np.allclose(factor * matrix(PauliSum(((1.0, word),))), first @ second)


def test_algebra() -> None:
    made = 0.5 * X(1) @ X(2) - Z(0) / 2 + 3 + -Y(1)
    kron = [dense.PAULI[letter] for letter in "IXYZ"]
    one, x, y, z = kron
    expected = 0.5 * np.kron(one, np.kron(x, x)) - np.kron(z, np.eye(4)) / 2 + 3 * np.eye(8)
    assert np.allclose(matrix(made), expected - np.kron(one, np.kron(y, one)))
    assert np.allclose(matrix((X(0) @ X(1)) @ (Y(0) @ Y(1))), -matrix(Z(0) @ Z(1)))
    assert X(0) + Z(1) - X(0) == Z(1)
    assert 2 - Z(0) == 2 * I() - Z(0)
    assert (X(0) * 0).terms == ()
    assert made.wires == (0, 1, 2)
    assert not made.is_diagonal
    assert (Z(0) @ Z(1) + Projector("1", 2)).is_diagonal


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("X2", X(2)),
        ("Z0 Z1", Z(0) @ Z(1)),
        ("Z0@Z1", Z(0) @ Z(1)),
        ("Z0*Y1", Z(0) @ Y(1)),
        ("0.5 Z0 Z1 + X2", 0.5 * Z(0) @ Z(1) + X(2)),
        ("-2e-1*Z0 - .5 X1 Y2 + 3", -0.2 * Z(0) - 0.5 * X(1) @ Y(2) + 3),
        ("I", I()),
        ("2 I0 Z1", 2 * Z(1)),
        ({"Z0 Z1": 0.5, "X2": 1}, 0.5 * Z(0) @ Z(1) + X(2)),
        ({"": 2.0, "Y1": -1}, 2 - Y(1)),
        (Z(0), Z(0)),
    ],
)
def test_spellings(spelling: object, expected: PauliSum) -> None:
    assert observable(spelling) == expected


def test_written_form_can_be_read_again() -> None:
    made = 0.5 * Z(0) @ Z(1) - X(2) + 1.25
    assert str(made) == "0.5 Z0 Z1 - X2 + 1.25 I"
    assert observable(str(made)) == made
    assert str(PauliSum()) == "0"
    assert str(Projector("01", (0, 2))) == "Projector(01 on 0 2)"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), wires=st.permutations(range(N)), count=st.integers(1, N))
def test_hermitian_in_pauli_words(seed: int, wires: list[int], count: int) -> None:
    draw = np.random.default_rng(seed)
    size = 2**count
    array = draw.normal(size=(size, size)) + 1j * draw.normal(size=(size, size))
    made = 1.5 * Hermitian(array + array.conj().T, wires[:count]) + X(0)
    assert np.allclose(matrix(made), matrix(made.paulis()), atol=1e-12)
    assert np.allclose(
        matrix(made), 1.5 * dense.expanded(array + array.conj().T, wires[:count], N) + matrix(X(0)), atol=1e-12
    )
    assert made.paulis().blocks == ()


def test_projectors() -> None:
    made = Projector("10", (2, 0))  # wire 2 is 1 and wire 0 is 0
    assert np.allclose(matrix(made), np.diag([0, 1, 0, 1, 0, 0, 0, 0]))
    assert np.allclose(matrix(made.paulis()), matrix(made))
    both = made @ Projector([1], 1)
    assert len(both.projectors) == 1
    assert np.allclose(matrix(both), np.diag([0, 0, 0, 1, 0, 0, 0, 0]))
    assert np.allclose(matrix(made @ Projector("1", 2)), matrix(made))
    assert np.allclose(matrix(made @ X(1)), matrix(made) @ matrix(X(1)))
    wide = Projector("0" * 20, range(20))
    assert wide.projectors[0][1][19] == (19, 0)
    with pytest.raises(UsageError, match="at most 8"):
        wide.paulis()


def test_lists_of_observables() -> None:
    assert observables("Z0") == (Z(0),)
    assert observables(["Z0", {"X1": 2}, Y(2)]) == (Z(0), 2 * X(1), Y(2))


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: observable("Q0"), "'Q0', column 1"),
    (lambda: observable("Z0 Z0"), "repeats wire 0"),
    (lambda: observable("Z"), "Z has no wire"),
    (lambda: observable(""), "expected something like"),
    (lambda: observable("Z0 +"), "'Z0 \\+', column 4"),
    (lambda: observable("Z0 & X1"), "column 4"),
    (lambda: observable(3), "observable 3"),
    (lambda: observable({"Z0": 1j}), "1j: expected a finite real number"),
    (lambda: observable({"A0": 1}), "'A0'"),
    (lambda: observables([]), "expected one or several"),
    (lambda: X(0) @ Y(0), "not Hermitian: Z0 has the coefficient"),
    (lambda: X(0) * Z(0), "written with @"),
    (lambda: X(0) * 1j, "real"),
    (lambda: X(-1), "different wires of 0 or more"),
    (lambda: Hermitian([[1, 2], [3, 4]], 0), "not Hermitian"),
    (lambda: Hermitian(np.eye(4), 0), r"shape \(4, 4\) on 1 wires"),
    (lambda: Hermitian(np.eye(4), (1, 1)), "different wires"),
    (lambda: Projector("02", (0, 1)), "'02'"),
    (lambda: Projector("0", (0, 1)), "on 2 wires"),
    (lambda: (Z(0) + 0.5 * X(7)).check(4), "acts on wire 7, but the circuit has wires 0 to 3"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_reference_agrees_with_itself() -> None:
    vector = np.random.default_rng(3).normal(size=8) + 1j * np.random.default_rng(4).normal(size=8)
    vector /= np.linalg.norm(vector)
    for wire in range(N):
        chance = dense.probabilities(vector, [wire])
        assert np.isclose(dense.expectation(vector, Z(wire)), chance[0] - chance[1])
        assert np.isclose(dense.variance(vector, Z(wire)), 1 - (chance[0] - chance[1]) ** 2)
        assert np.isclose(
            np.trace(dense.reduced(vector, [wire]) @ dense.PAULI["X"]), dense.expectation(vector, X(wire))
        )
