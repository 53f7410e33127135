"""Noise: Kraus channels, rho -> sum of K rho K^+, as operations of a circuit.

    circuit.depolarizing(0, 0.01).amplitude_damping(1, 0.05)
    circuit.channel(kraus([k0, k1]), (2, 3))

A state vector that meets a channel takes one of its Kraus operators at random (a quantum trajectory); a DensityState
applies the superoperator sum of K x conj(K). A channel whose Kraus operators are all multiples of unitaries has
probabilities that do not depend on the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from unisono.errors import UsageError
from unisono.quantum.circuit.gates import PAULIS, UNITARY_TOLERANCE, Gate, Matrix, pauli_matrix
from unisono.quantum.circuit.parameter import Affine

if TYPE_CHECKING:
    from typing import Self

    from unisono.quantum.circuit.parameter import Angle

MOST_WIRES = 4  # of one channel: its superoperator is a matrix on twice as many
_EXACT = 1e-14


@dataclass(frozen=True, eq=False, repr=False)
class Channel(Gate):
    """A channel by its Kraus operators, complex128 (2^targets, 2^targets). `label` is what drawings show."""

    operators: tuple[Matrix, ...] = ()
    label: str = "KRAUS"
    unitary: bool = field(default=False, init=False)

    @cached_property
    def probabilities(self) -> tuple[float, ...] | None:
        """Of the Kraus operators, where they are the same for every state: all are multiples of unitaries."""
        found = []
        for each in self.operators:
            product_ = each.conj().T @ each
            found.append(float(np.trace(product_).real) / len(each))
            if np.abs(product_ - found[-1] * np.eye(len(each))).max() > _EXACT:
                return None
        return tuple(found)

    @cached_property
    def effects(self) -> Matrix:
        """K^+ K of each Kraus operator K: its probability is the expectation value of that."""
        return np.array([each.conj().T @ each for each in self.operators])

    def superoperator(self) -> Superoperator:
        """The channel on the row-major vector of a density matrix: targets of the rows first, then of the columns."""
        matrix = sum(np.kron(each, each.conj()) for each in self.operators)
        return Superoperator(self.name, 2 * self.targets, array=matrix)  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return _channel, (self.name, self.operators, self.label)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Channel) and np.array_equal(self.operators, other.operators)

    def __hash__(self) -> int:
        return hash(tuple(each.tobytes() for each in self.operators))


@dataclass(frozen=True, eq=False, repr=False)
class Superoperator(Gate):
    """A linear map of density matrices as a matrix. It is scheduled and applied as gates are, but keeps no norm."""

    array: Matrix = None  # type: ignore[assignment]

    def matrix(self, *angles: float) -> Matrix:
        return self.array


@dataclass(frozen=True, eq=False, repr=False)
class StrengthChannel(Channel):
    """A channel whose strength is an expression of weights and features: the parameter of its operation. It has Kraus
    operators when `at` gives it a number."""

    make: str = ""
    rest: tuple[Any, ...] = ()  # its other arguments

    def at(self, strength: float) -> Channel:
        return _BY_STRENGTH[self.make](strength, *self.rest)

    def superoperator(self) -> StrengthSuperoperator:
        return StrengthSuperoperator(self.name, 2 * self.targets, 1, channel=self)

    def __reduce__(self) -> Any:
        return _of_strength, (self.make, self.targets, self.rest, self.label)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StrengthChannel) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self.make, self.targets, self.rest))


@dataclass(frozen=True, eq=False, repr=False)
class StrengthSuperoperator(Superoperator):
    channel: StrengthChannel = None  # type: ignore[assignment]

    def matrix(self, *angles: float) -> Matrix:
        return self.channel.at(*angles).superoperator().array

    def derivative(self, which: int, *angles: float) -> Matrix:
        """Each is A + p B + sqrt(1 - p) C, p being the strength; its values at 0, 3/4 and 1 give B and C."""
        none, most, full = (self.matrix(strength) for strength in (0.0, 0.75, 1.0))
        root = 4 * most - none - 3 * full
        slope = full - none + root
        if np.abs(root).max() <= _EXACT:
            return slope
        if angles[0] >= 1:
            raise UsageError(f"{self.name} of strength 1 has no derivative there; expected less than 1")
        return slope - root / (2 * np.sqrt(1 - angles[0]))


def kraus(operators: Sequence[ArrayLike]) -> Channel:
    """A channel by its Kraus operators, whose sum of K^+ K must be the identity."""
    try:
        arrays = [np.array(each, dtype=np.complex128) for each in operators]
    except (TypeError, ValueError, RuntimeError, OverflowError) as cause:
        raise UsageError(f"kraus: expected a list of matrices of 2^k x 2^k numbers ({cause})") from None
    shapes = {each.shape for each in arrays}
    size = len(arrays[0]) if arrays and arrays[0].ndim else 0
    if shapes != {(size, size)} or size < 2 or size & (size - 1) or size > 1 << MOST_WIRES:
        listed = ", ".join(map(str, sorted(shapes))) or "none"
        raise UsageError(f"Kraus operators of shape {listed}: expected (2^k, 2^k), alike, k from 1 to {MOST_WIRES}")
    total = sum(each.conj().T @ each for each in arrays)
    error = np.abs(total - np.eye(size)).max()
    if not error <= UNITARY_TOLERANCE:
        raise UsageError(
            f"Kraus operators are not complete: the sum of K^+ K differs from the identity by {error:.3g}; scale them, "
            "or add the missing operator"
        )
    if error > _EXACT:  # K (sum of K^+ K)^(-1/2) is the nearest complete set
        values, vectors = np.linalg.eigh(total)
        root = (vectors / np.sqrt(values)) @ vectors.conj().T
        arrays = [each @ root for each in arrays]
    return _channel("kraus", arrays)


def pauli_channel(probabilities: Mapping[str, float]) -> Channel:
    """Pauli strings with these probabilities, such as {"X": 0.1} or {"XX": 0.1, "IZ": 0.05}; else the identity."""
    if not isinstance(probabilities, Mapping) or not probabilities:
        raise UsageError(f'pauli_channel({probabilities!r}): expected probabilities of Pauli strings: {{"X": 0.1}}')
    strings = list(probabilities)
    count = len(strings[0]) if isinstance(strings[0], str) else 0
    for each in strings:
        if not isinstance(each, str) or len(each) != count or not each or set(each) - set("IXYZ"):
            raise UsageError(f"pauli_channel of {each!r}: expected Pauli strings of I, X, Y, Z, all of one length")
    if count > MOST_WIRES:
        raise UsageError(f"pauli_channel on {count} wires: at most {MOST_WIRES}; use several channels")
    chances = {each: _probability("pauli_channel", value) for each, value in probabilities.items()}
    rest = 1 - sum(chance for each, chance in chances.items() if each != "I" * count)
    if rest < -_EXACT or abs(chances.get("I" * count, rest) - rest) > UNITARY_TOLERANCE:
        raise UsageError(f"pauli_channel: the probabilities sum to {sum(chances.values()):.6g}, expected at most 1")
    chances = {"I" * count: max(rest, 0.0)} | {each: c for each, c in chances.items() if each != "I" * count}
    kept = [np.sqrt(chance) * pauli_matrix(each) for each, chance in chances.items() if chance]
    shown = ",".join(f"{each}:{chance:.3g}" for each, chance in list(chances.items())[1:4])
    return _channel("pauli_channel", kept, f"PAULI({shown})")


def depolarizing(p: float, wires: int = 1) -> Channel:
    """With probability p one of the 4^wires - 1 Pauli strings that are not the identity, each as likely."""
    p = _probability("depolarizing", p)
    if wires not in range(1, MOST_WIRES + 1):
        raise UsageError(f"depolarizing on {wires!r} wires: expected 1 to {MOST_WIRES}")
    strings = ["".join(each) for each in product("IXYZ", repeat=wires)]
    chances = [1 - p] + [p / (len(strings) - 1)] * (len(strings) - 1)
    kept = [np.sqrt(chance) * pauli_matrix(each) for each, chance in zip(strings, chances, strict=True) if chance]
    return _channel("depolarizing", kept, f"DEPOL({p:.3g})")


def bit_flip(p: float) -> Channel:
    """X with probability p."""
    return _flip("bit_flip", "X", p, "BF")


def phase_flip(p: float) -> Channel:
    """Z with probability p."""
    return _flip("phase_flip", "Z", p, "PF")


def amplitude_damping(gamma: float, excited: float = 0.0) -> Channel:
    """|1> decays to |0> with probability gamma; towards a mixture in which |1> has the probability `excited`."""
    gamma, excited = _probability("amplitude_damping", gamma), _probability("amplitude_damping", excited)
    keep, lose = np.sqrt(1 - gamma), np.sqrt(gamma)
    down = [np.diag([1, keep]), np.array([[0, lose], [0, 0]])]
    up = [np.diag([keep, 1]), np.array([[0, 0], [lose, 0]])]
    weighted = [np.sqrt(1 - excited) * each for each in down] + [np.sqrt(excited) * each for each in up]
    return _channel("amplitude_damping", [each for each in weighted if each.any()], f"AD({gamma:.3g})")


def phase_damping(gamma: float) -> Channel:
    """The coherence between |0> and |1> is multiplied by sqrt(1 - gamma)."""
    gamma = _probability("phase_damping", gamma)
    flip = (1 - np.sqrt(1 - gamma)) / 2  # the same channel as a mixture of unitaries
    kept = [np.sqrt(c) * PAULIS[pauli] for c, pauli in ((1 - flip, "I"), (flip, "Z")) if c]
    return _channel("phase_damping", kept, f"PD({gamma:.3g})")


RESET = [np.array([[1, 0], [0, 0]]), np.array([[0, 1], [0, 0]])]  # Kraus operators of a reset


class ChannelMethods:
    """Mixed into Circuit: the methods that add channels; each returns the circuit."""

    if TYPE_CHECKING:

        def apply(self, kind: str | Gate, targets: int | Sequence[int] = (), *angles: Angle) -> Self: ...

    def channel(self, channel: Channel, wires: int | Sequence[int]) -> Self:
        """Any channel; the first wire is the most significant bit of its matrices' indices."""
        if not isinstance(channel, Channel):
            raise UsageError(f"channel of a {type(channel).__name__}: expected a Channel, such as uq.depolarizing(0.1)")
        return self.apply(channel, wires)

    def kraus(self, operators: Sequence[ArrayLike], wires: int | Sequence[int]) -> Self:
        return self.apply(kraus(operators), wires)

    def depolarizing(self, wires: int | Sequence[int], p: float | Affine) -> Self:
        """p, as that of the channels below: a number, or an expression such as uq.weight(3) or uq.feature(0)."""
        count = len([*wires]) if isinstance(wires, Iterable) and not isinstance(wires, str) else 1
        return self._of_strength("depolarizing", wires, p, count)

    def bit_flip(self, wire: int, p: float | Affine) -> Self:
        return self._of_strength("bit_flip", wire, p)

    def phase_flip(self, wire: int, p: float | Affine) -> Self:
        return self._of_strength("phase_flip", wire, p)

    def pauli_channel(self, wires: int | Sequence[int], probabilities: Mapping[str, float]) -> Self:
        return self.apply(pauli_channel(probabilities), wires)

    def amplitude_damping(self, wire: int, gamma: float | Affine, excited: float = 0.0) -> Self:
        return self._of_strength("amplitude_damping", wire, gamma, excited)

    def phase_damping(self, wire: int, gamma: float | Affine) -> Self:
        return self._of_strength("phase_damping", wire, gamma)

    def _of_strength(self, make: str, wires: int | Sequence[int], strength: float | Affine, *rest: Any) -> Self:
        if not isinstance(strength, Affine):
            return self.apply(_BY_STRENGTH[make](strength, *rest), wires)
        if strength.is_constant:
            return self.apply(_BY_STRENGTH[make](strength.constant, *rest), wires)
        known = _BY_STRENGTH[make](0.5, *rest)  # refuses the other arguments
        label = f"{known.label.partition('(')[0]}({strength})"
        return self.apply(_of_strength(make, known.targets, rest, label), wires, strength)


_BY_STRENGTH: dict[str, Callable[..., Channel]] = {
    each.__name__: each for each in (depolarizing, bit_flip, phase_flip, amplitude_damping, phase_damping)
}


def _of_strength(make: str, targets: int, rest: tuple[Any, ...], label: str) -> StrengthChannel:
    return StrengthChannel(make, targets, 1, label=label, make=make, rest=rest)


def _flip(name: str, pauli: str, p: float, short: str) -> Channel:
    p = _probability(name, p)
    kept = [np.sqrt(chance) * PAULIS[each] for chance, each in ((1 - p, "I"), (p, pauli)) if chance]
    return _channel(name, kept, f"{short}({p:.3g})")


def _channel(name: str, operators: Sequence[Matrix], label: str = "KRAUS") -> Channel:
    kept = tuple(np.asarray(each, dtype=np.complex128) for each in operators)
    for each in kept:
        each.setflags(write=False)
    return Channel(name, len(kept[0]).bit_length() - 1, operators=kept, label=label)


def _probability(what: str, given: Any) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError, RuntimeError):
        value = -1.0
    if not 0 <= value <= 1 or isinstance(given, str):
        raise UsageError(f"{what}: probability {given!r}, expected a number of 0 to 1")
    return value
