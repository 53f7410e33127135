"""Observables: real sums of Pauli strings, Hermitian matrices on few wires, and projectors.

    Z(0)      0.5 * X(1) @ X(2) - Z(0)      "X5"      "0.5 Z0 Z1 + X2"      {"Z0 Z1": 0.5, "X2": 1}
    Hermitian(matrix, wires=(0, 1))         Projector("01", wires=(0, 3))

All of them are a PauliSum. `observable(anything)` makes one.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike

from unisono.errors import UsageError
from unisono.quantum.circuit.gates import Matrix, pauli_matrix
from unisono.quantum.circuit.parameter import in_order, is_index

PauliString = tuple[tuple[int, str], ...]  # (wire, "X" | "Y" | "Z"), sorted by wire; () is the identity
Values = tuple[tuple[int, int], ...]  # (wire, 0 | 1), sorted by wire

HERMITIAN_TOLERANCE = 1e-8
_MOST_WIRES = 1 << 20
LARGEST_EXPANSION = 8  # wires of a matrix or projector that is written out in Pauli strings (4^8 or 2^8 of them)


@dataclass(frozen=True, eq=False)
class Block:
    """A Hermitian matrix on wires, the first most significant."""

    coefficient: float
    wires: tuple[int, ...]
    matrix: Matrix


@dataclass(frozen=True, eq=False)
class PauliSum:
    """sum of coefficient * Pauli string, plus Hermitian blocks, plus coefficient * |values><values| on some wires.

    Each Pauli string occurs once, with a coefficient that is not zero."""

    terms: tuple[tuple[float, PauliString], ...] = ()
    blocks: tuple[Block, ...] = ()
    projectors: tuple[tuple[float, Values], ...] = ()

    @property
    def wires(self) -> tuple[int, ...]:
        """The wires it acts on, sorted."""
        pauli_strings = [*(pauli_string for _, pauli_string in self.terms), *(values for _, values in self.projectors)]
        acted = {wire for pauli_string in pauli_strings for wire, _ in pauli_string}
        return tuple(sorted(acted.union(*(block.wires for block in self.blocks))))

    @property
    def is_diagonal(self) -> bool:
        return not self.blocks and all(pauli == "Z" for _, pauli_string in self.terms for _, pauli in pauli_string)

    def check(self, wires: int) -> PauliSum:
        """Itself, or an error that names the wires a circuit of `wires` wires does not have."""
        self.check_form()
        if not is_index(wires):
            raise UsageError(f"observable {self} on {wires!r} wires: expected how many wires there are")
        missing = [wire for wire in self.wires if wire >= wires]
        if missing:
            listed = ", ".join(map(str, missing))
            raise UsageError(f"observable {self} acts on wire {listed}, but the circuit has wires 0 to {wires - 1}")
        return self

    def check_form(self) -> None:
        """Refuse fields that no observable has; uq.X, "X0", uq.Hermitian and uq.Projector make them right."""
        try:
            pauli_strings = all(
                _is_finite(c) and all(pauli in "XYZ" for _, pauli in pauli_string) for c, pauli_string in self.terms
            )
            wires = all(is_index(wire) and wire >= 0 for wire in self.wires)
            blocks = all(isinstance(block, Block) and _is_finite(block.coefficient) for block in self.blocks)
            bits = all(_is_finite(c) and all(bit in (0, 1) for _, bit in values) for c, values in self.projectors)
            fine = pauli_strings and wires and blocks and bits
        except (TypeError, ValueError, AttributeError):
            fine = False
        if not fine:
            raise UsageError(
                f"PauliSum(terms={self.terms!r}, blocks={self.blocks!r}, projectors={self.projectors!r}): expected "
                'finite coefficients with Pauli strings such as ((0, "X"),); uq.X(0), "X0 Z1", uq.Projector make them'
            )

    def paulis(self) -> PauliSum:
        """The same with blocks and projectors written out in Pauli strings."""
        parts = [(complex(coefficient), pauli_string) for coefficient, pauli_string in self.terms]
        for block in self.blocks:
            parts += _block_strings(block)
        for coefficient, values in self.projectors:
            parts += _projector_strings(coefficient, values)
        return PauliSum(_collect(parts))

    def __add__(self, other: PauliSum | SupportsFloat) -> PauliSum:
        right = observable(other) if isinstance(other, PauliSum | Mapping | str) else _identity(other)
        return PauliSum(
            _collect(
                [(complex(coefficient), pauli_string) for coefficient, pauli_string in (*self.terms, *right.terms)]
            ),
            (*self.blocks, *right.blocks),
            (*self.projectors, *right.projectors),
        )

    def __mul__(self, factor: SupportsFloat) -> PauliSum:
        if isinstance(factor, PauliSum):
            raise UsageError("a product of observables is written with @")
        number = _real(factor)
        return PauliSum(
            tuple((number * coefficient, pauli_string) for coefficient, pauli_string in self.terms if number),
            tuple(Block(number * block.coefficient, block.wires, block.matrix) for block in self.blocks if number),
            tuple((number * coefficient, values) for coefficient, values in self.projectors if number),
        )

    def __matmul__(self, other: PauliSum) -> PauliSum:
        """The product; an error where it is not Hermitian."""
        if not isinstance(other, PauliSum):
            raise UsageError(f"{self} @ {other!r}: expected another observable, such as uq.Z(1)")
        single = len(self.projectors) == len(other.projectors) == 1
        if single and not (self.terms or self.blocks or other.terms or other.blocks):
            (left, first), (right, second) = self.projectors[0], other.projectors[0]
            if not {wire for wire, _ in first} & {wire for wire, _ in second}:
                return PauliSum(projectors=((left * right, tuple(sorted(first + second))),))
        parts = []
        for (left, first_string), (right, second_string) in product(self.paulis().terms, other.paulis().terms):
            factor, pauli_string = multiply(first_string, second_string)
            parts.append((left * right * factor, pauli_string))
        return PauliSum(_collect(parts))

    def __neg__(self) -> PauliSum:
        return self * -1.0

    def __sub__(self, other: PauliSum | SupportsFloat) -> PauliSum:
        return self + (-observable(other) if isinstance(other, PauliSum | Mapping | str) else -_real(other))

    def __rsub__(self, other: SupportsFloat) -> PauliSum:
        return -self + other

    def __truediv__(self, divisor: SupportsFloat) -> PauliSum:
        number = _real(divisor)
        if not number:
            raise UsageError(f"({self}) / {divisor!r}: expected a divisor that is not zero")
        return self * (1.0 / number)

    def __rtruediv__(self, other: object) -> PauliSum:
        raise UsageError(f"{other!r} / ({self}): an observable cannot divide; it may be divided by a number")

    def __rmatmul__(self, other: object) -> PauliSum:
        raise UsageError(f"{other!r} @ ({self}): expected another observable, such as uq.Z(1)")

    __radd__ = __add__
    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PauliSum) and self.paulis()._exact() == other.paulis()._exact()

    __hash__ = None  # type: ignore[assignment]

    def _exact(self) -> dict[PauliString, float]:
        return {pauli_string: coefficient for coefficient, pauli_string in self.terms}

    def __str__(self) -> str:
        shown = [_shown(coefficient, _written(pauli_string)) for coefficient, pauli_string in self.terms]
        shown += [_shown(block.coefficient, f"Hermitian{block.wires}") for block in self.blocks]
        for coefficient, values in self.projectors:
            bits = "".join(str(bit) for _, bit in values)
            shown.append(_shown(coefficient, f"Projector({bits} on {' '.join(str(wire) for wire, _ in values)})"))
        return " + ".join(shown[:8] + ["..."] * (len(shown) > 8)).replace("+ -", "- ") or "0"

    __repr__ = __str__


def X(wire: int) -> PauliSum:
    return _single(wire, "X")


def Y(wire: int) -> PauliSum:
    return _single(wire, "Y")


def Z(wire: int) -> PauliSum:
    return _single(wire, "Z")


def I(wire: int = 0) -> PauliSum:  # noqa: E743 - the Pauli is the operator's name
    """The identity; it acts on no wire, whatever wire is named."""
    _single(wire, "I")
    return PauliSum(((1.0, ()),))


def Hermitian(matrix: ArrayLike, wires: int | Sequence[int]) -> PauliSum:
    """A Hermitian matrix on wires, the first wire most significant."""
    checked = _checked_wires(wires)
    try:
        array = np.array(matrix, dtype=np.complex128)
    except (TypeError, ValueError, RuntimeError, OverflowError) as cause:
        raise UsageError(f"Hermitian: expected a matrix of 2^k x 2^k numbers ({cause})") from None
    if array.shape != (2 ** len(checked),) * 2:
        raise UsageError(f"Hermitian matrix of shape {array.shape} on {len(checked)} wires: expected 2^k x 2^k")
    error = np.abs(array - array.conj().T).max()
    if not np.isfinite(array).all() or not error <= HERMITIAN_TOLERANCE * max(1.0, np.abs(array).max()):
        raise UsageError(f"matrix is not Hermitian: it differs from its adjoint by {error:.3g}")
    return PauliSum(blocks=(Block(1.0, checked, (array + array.conj().T) / 2),))


def Projector(values: str | Sequence[int], wires: int | Sequence[int]) -> PauliSum:
    """|values><values| on wires: the probability of reading these bits there."""
    checked = _checked_wires(wires)
    given: Any = values if isinstance(values, Iterable) and getattr(values, "ndim", 1) != 0 else (values,)
    bits = [int(value) if str(_plain(value)) in ("0", "1") else -1 for value in given]
    if len(bits) != len(checked) or -1 in bits:
        raise UsageError(f"Projector({values!r}) on {len(checked)} wires: expected one of 0, 1 for each wire")
    return PauliSum(projectors=((1.0, tuple(sorted(zip(checked, bits, strict=True)))),))


def observable(given: Any) -> PauliSum:
    """A PauliSum from one, from a string or from a mapping of strings to coefficients."""
    if isinstance(given, PauliSum):
        return given
    if isinstance(given, str):
        return _parse(given)
    if isinstance(given, Mapping):
        parts = [
            (complex(_real(coefficient)), _pauli_string(pauli_strings)) for pauli_strings, coefficient in given.items()
        ]
        return PauliSum(_collect(parts))
    raise UsageError(f'observable {given!r}: expected uq.Z(0), "Z0 Z1" or {{"Z0 Z1": 0.5}}')


def observables(given: Any) -> tuple[PauliSum, ...]:
    """A list of observables from a list of them, or from one."""
    if isinstance(given, PauliSum | str | Mapping):
        return (observable(given),)
    several = isinstance(given, Iterable) and getattr(given, "ndim", 1) != 0
    if not several or not (made := tuple(observable(each) for each in given)):
        raise UsageError(f"observables {given!r}: expected one or several observables")
    return made


def multiply(left: PauliString, right: PauliString) -> tuple[complex, PauliString]:
    """The product of two Pauli strings: a power of i, and a Pauli string."""
    factor = 1 + 0j
    by_wire = dict(left)
    for wire, pauli in right:
        before = by_wire.pop(wire, "I")
        if before == "I":
            by_wire[wire] = pauli
        elif before != pauli:
            (third,) = {"X", "Y", "Z"} - {before, pauli}
            by_wire[wire] = third
            factor *= 1j if before + pauli in ("XY", "YZ", "ZX") else -1j
    return factor, tuple(sorted(by_wire.items()))


_SUM = re.compile(
    r"\s*([+-]?)\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)?\s*\*?\s*((?:[IXYZ]\d*[\s@*]*)*)"
)
_PAULI = re.compile(r"([IXYZ])(\d*)")


def _parse(text: str) -> PauliSum:
    parts: list[tuple[complex, PauliString]] = []
    position = 0
    while position < len(text.rstrip()):
        match = _SUM.match(text, position)
        sign, number, pauli_strings = match.groups() if match else ("", None, "")
        if not match or (number is None and not pauli_strings) or (position and not sign):
            raise UsageError(f'observable {text!r}, column {position + 1}: expected something like "0.5 Z0 Z1 + X2"')
        parts.append((complex(_real(f"{sign}{number or 1}")), _pauli_string(pauli_strings)))
        position = match.end()
    if not parts:
        raise UsageError('observable "": expected something like "Z0 Z1"')
    return PauliSum(_collect(parts))


def _pauli_string(text: str) -> PauliString:
    if not isinstance(text, str):
        raise UsageError(f'Pauli string {text!r}: expected Paulis with wires, such as "X0 Z12"')
    by_wire: dict[int, str] = {}
    rest = _PAULI.sub("", text)
    if rest.strip(" @*\t"):
        raise UsageError(f'Pauli string {text!r}: expected Paulis I, X, Y, Z with wires, such as "X0 Z12"')
    for pauli, wire in _PAULI.findall(text):
        if pauli == "I":
            continue
        if not wire or int(wire) in by_wire:
            raise UsageError(
                f"Pauli string {text!r}: {pauli} " + ("has no wire" if not wire else f"repeats wire {wire}")
            )
        by_wire[int(wire)] = pauli
    return tuple(sorted(by_wire.items()))


def _collect(parts: Iterable[tuple[complex, PauliString]]) -> tuple[tuple[float, PauliString], ...]:
    total: dict[PauliString, complex] = {}
    for coefficient, pauli_string in parts:
        total[pauli_string] = total.get(pauli_string, 0) + coefficient
    for pauli_string, coefficient in total.items():
        if abs(coefficient.imag) > 1e-12 * max(1.0, abs(coefficient.real)):
            raise UsageError(
                f"the product is not Hermitian: {_written(pauli_string)} has the coefficient {coefficient:g}"
            )
    return tuple((coefficient.real, pauli_string) for pauli_string, coefficient in total.items() if coefficient.real)


def _block_strings(block: Block) -> list[tuple[complex, PauliString]]:
    _refuse_expansion("Hermitian matrix", len(block.wires))
    parts: list[tuple[complex, PauliString]] = []
    size = len(block.matrix)
    for by_wire in product("IXYZ", repeat=len(block.wires)):
        overlap = np.vdot(pauli_matrix("".join(by_wire)), block.matrix) / size
        if abs(overlap) > 1e-15:
            pairs = zip(block.wires, by_wire, strict=True)
            parts.append(
                (complex(block.coefficient * overlap.real), tuple(sorted(pair for pair in pairs if pair[1] != "I")))
            )
    return parts


def _projector_strings(coefficient: float, values: Values) -> list[tuple[complex, PauliString]]:
    _refuse_expansion("Projector", len(values))
    parts: list[tuple[complex, PauliString]] = [(complex(coefficient), ())]
    for wire, bit in values:
        sign = -0.5 if bit else 0.5
        parts = [(0.5 * c, w) for c, w in parts] + [(sign * c, (*w, (wire, "Z"))) for c, w in parts]
    return parts


def _refuse_expansion(kind: str, wires: int) -> None:
    if wires > LARGEST_EXPANSION:
        raise UsageError(
            f"{kind} on {wires} wires is not written out in Pauli strings (at most {LARGEST_EXPANSION} wires)"
        )


def _checked_wires(wires: int | Sequence[int]) -> tuple[int, ...]:
    try:
        checked: tuple[Any, ...] = (wires,) if is_index(wires) else in_order(wires)
    except TypeError:
        raise UsageError(f"wires {wires!r}: expected a wire of 0 or more, or several") from None
    full = all(is_index(wire) and 0 <= wire < _MOST_WIRES for wire in checked)
    if not checked or not full or len({*map(int, checked)}) != len(checked):
        raise UsageError(f"wires {checked}: expected different wires of 0 or more")
    return tuple(int(wire) for wire in checked)


def _single(wire: int, pauli: str) -> PauliSum:
    if not is_index(wire):
        raise UsageError(f"{pauli}({wire!r}): expected a wire of 0 or more")
    return PauliSum(((1.0, ((_checked_wires(wire)[0], pauli),)),))


def _identity(number: SupportsFloat) -> PauliSum:
    value = _real(number)
    return PauliSum(((value, ()),) if value else ())


def _real(number: Any) -> float:
    try:
        value = complex(number)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"coefficient {number!r}: expected a real number") from None
    if value.imag or not math.isfinite(value.real):
        raise UsageError(f"coefficient {number!r}: expected a finite real number, so that the observable is Hermitian")
    return value.real


def _is_finite(coefficient: float) -> bool:
    return isinstance(coefficient, float | int) and abs(coefficient) <= sys.float_info.max


def _plain(value: Any) -> Any:
    """A number of numpy or torch as Python's own, which prints as a digit."""
    return int(value) if is_index(value) else value


def _written(pauli_string: PauliString) -> str:
    return " ".join(f"{pauli}{wire}" for wire, pauli in pauli_string) or "I"


def _shown(coefficient: float, name: str) -> str:
    return name if coefficient == 1 else f"-{name}" if coefficient == -1 else f"{coefficient:g} {name}"
