"""The gates: their matrices, exact derivatives, inverses and spectra.

A gate has no controls: CNOT is X on one target, with a control that the Operation carries. The first target is the most
significant bit of a matrix's index. Rotations are exp(-i angle P / 2).
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.errors import UsageError
from unisono.quantum.circuit.parameter import Affine

Matrix = NDArray[np.complex128]
Parameters = tuple[Affine, ...]

UNITARY_TOLERANCE = 1e-6  # entries of U U^+ - 1; a matrix typed with seven digits passes
_EXACT = 1e-14  # of the same: rounding
LARGEST_DENSE = 13  # targets of a gate whose dense matrix is built on demand (1 GiB at 13)


@dataclass(frozen=True, eq=False, repr=False)
class Gate:
    """A kind of operation. `spectra[j]` holds the eigenvalues g of the generator of parameter j: U ~ exp(i g angle)."""

    name: str
    targets: int
    parameters: int = 0
    diagonal: bool = False
    unitary: bool = True
    spectra: tuple[tuple[float, ...], ...] = ()

    def matrix(self, *angles: float) -> Matrix:
        """The matrix, complex128, (2^targets, 2^targets)."""
        raise UsageError(f"{self.name} has no matrix")

    def derivative(self, which: int, *angles: float) -> Matrix:
        """d matrix / d angles[which], exact."""
        raise UsageError(f"{self.name} has no parameter {which}")

    def entries(self, *angles: float) -> Matrix:
        """The diagonal of a diagonal gate, (2^targets,)."""
        return np.diagonal(self.matrix(*angles)).copy()

    def inverse(self, parameters: Parameters) -> tuple[Gate, Parameters]:
        """The gate and parameters that undo this gate with `parameters`."""
        raise UsageError(f"{self.name} has no inverse")

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, repr=False)
class StandardGate(Gate):
    """A gate of the table below, found by its name."""

    build: Callable[..., Any] = lambda: None
    derive: Callable[..., Any] | None = None
    invert: Callable[[Parameters], tuple[str, Parameters]] | None = None

    def matrix(self, *angles: float) -> Matrix:
        return np.array(self.build(*angles), dtype=np.complex128)

    def derivative(self, which: int, *angles: float) -> Matrix:
        if self.derive is None:
            return super().derivative(which, *angles)
        return np.array(self.derive(which, *angles), dtype=np.complex128)

    def inverse(self, parameters: Parameters) -> tuple[Gate, Parameters]:
        if self.invert is None:
            return self, parameters
        name, angles = self.invert(parameters)
        return GATES[name], angles

    def __reduce__(self) -> Any:
        return gate, (self.name,)


@dataclass(frozen=True, eq=False, repr=False)
class PauliRotation(Gate):
    """exp(-i angle/2 P) for a Pauli string P such as "XYZ", one Pauli for each target."""

    paulis: str = ""

    def matrix(self, *angles: float) -> Matrix:
        _refuse_dense(self)
        (angle,) = angles
        pauli = pauli_matrix(self.paulis)
        return math.cos(angle / 2) * np.eye(len(pauli)) - 1j * math.sin(angle / 2) * pauli

    def derivative(self, which: int, *angles: float) -> Matrix:
        return self.matrix(angles[0] + math.pi) / 2

    def entries(self, *angles: float) -> Matrix:
        if not self.diagonal:
            return super().entries(*angles)
        signs = reduce(np.kron, [np.array([1.0, -1.0])] * self.targets)
        return np.exp(-0.5j * angles[0] * signs)

    def inverse(self, parameters: Parameters) -> tuple[Gate, Parameters]:
        return self, (-parameters[0],)

    def __reduce__(self) -> Any:
        return pauli_rotation, (self.paulis,)


@dataclass(frozen=True, eq=False, repr=False)
class ArrayGate(Gate):
    """An explicit unitary (`array` of two dimensions) or diagonal (of one)."""

    array: Matrix = None  # type: ignore[assignment]

    def matrix(self, *angles: float) -> Matrix:
        if self.array.ndim == 2:
            return self.array.copy()
        _refuse_dense(self)
        return np.diag(self.array)

    def entries(self, *angles: float) -> Matrix:
        return self.array.copy() if self.array.ndim == 1 else super().entries()

    def inverse(self, parameters: Parameters) -> tuple[Gate, Parameters]:
        adjoint = self.array.conj().T if self.array.ndim == 2 else self.array.conj()
        return _array_gate(self.name, adjoint), ()

    def __reduce__(self) -> Any:
        return _array_gate, (self.name, np.array(self.array))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayGate) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())


def gate(name: str) -> Gate:
    """The gate of that name; an unknown one is an error that lists the names there are."""
    try:
        return GATES[name]
    except KeyError:
        names = ", ".join(sorted({*GATES, *CONTROLLED, *ALIASES}))
        raise UsageError(f"gate {name!r} is not known; expected one of: {names}") from None


@lru_cache(maxsize=4096)
def pauli_rotation(paulis: str) -> PauliRotation:
    """The rotation about a Pauli string of X, Y, Z (identities are left out: they are not targets)."""
    if not paulis or set(paulis) - set("XYZ"):
        raise UsageError(f"Pauli string {paulis!r}: expected Paulis X, Y, Z, one for each wire")
    return PauliRotation(
        "pauli_rotation",
        len(paulis),
        1,
        diagonal=set(paulis) == {"Z"},
        spectra=((-0.5, 0.5),),
        paulis=paulis,
    )


def unitary(matrix: ArrayLike) -> ArrayGate:
    """A gate with this matrix, which must be unitary."""
    array = _numbers("unitary", matrix)
    size = len(array) if array.ndim else 0
    if array.ndim != 2 or array.shape != (size, size) or size < 2 or size & (size - 1):
        raise UsageError(f"unitary of shape {array.shape}: expected (2^k, 2^k) for a gate on k wires")
    error = np.abs(array @ array.conj().T - np.eye(size)).max()
    if not error <= UNITARY_TOLERANCE:
        raise UsageError(f"matrix is not unitary: U U^+ differs from the identity by {error:.3g}")
    for _ in range(2 if error > _EXACT else 0):  # towards the nearest unitary: norms are checked more closely than this
        array = array @ (3 * np.eye(size) - array.conj().T @ array) / 2
    return _array_gate("unitary", array)


def diagonal(entries: ArrayLike) -> ArrayGate:
    """A diagonal gate with these entries, each of modulus one."""
    array = _numbers("diagonal", entries)
    size = len(array) if array.ndim else 0
    if array.ndim != 1 or size < 2 or size & (size - 1):
        raise UsageError(f"diagonal of shape {array.shape}: expected (2^k,) for a gate on k wires")
    error = np.abs(np.abs(array) - 1).max()
    if not error <= UNITARY_TOLERANCE:
        raise UsageError(f"diagonal is not unitary: an entry's modulus differs from 1 by {error:.3g}")
    return _array_gate("diagonal", array / np.abs(array) if error > _EXACT else array)


def _numbers(kind: str, given: ArrayLike) -> Matrix:
    try:
        return np.array(given, dtype=np.complex128)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(f"{kind}: expected an array of numbers ({error})") from None


def pauli_matrix(pauli_string: str) -> Matrix:
    """The dense matrix of a Pauli string of I, X, Y, Z."""
    matrix: Any = np.ones((1, 1), dtype=np.complex128)
    for single in pauli_string:
        matrix = np.kron(matrix, PAULIS[single])
    return matrix


def _array_gate(name: str, array: Matrix) -> ArrayGate:
    array.setflags(write=False)
    return ArrayGate(name, len(array).bit_length() - 1, diagonal=array.ndim == 1, array=array)


def _refuse_dense(kind: Gate) -> None:
    if kind.targets > LARGEST_DENSE:
        raise UsageError(
            f"the dense matrix of {kind.name} on {kind.targets} wires is too large (at most {LARGEST_DENSE}); "
            "its diagonal or its Pauli string stands for it"
        )


PAULIS: dict[str, Matrix] = {
    "I": np.eye(2, dtype=np.complex128),
    "X": np.array([[0, 1], [1, 0]], dtype=np.complex128),
    "Y": np.array([[0, -1j], [1j, 0]], dtype=np.complex128),
    "Z": np.array([[1, 0], [0, -1]], dtype=np.complex128),
}
_HALF = math.sqrt(0.5)
_EIGHTH = cmath.exp(0.25j * math.pi)
_FIXED: dict[str, tuple[Any, str]] = {  # matrix, inverse
    "id": (PAULIS["I"], "id"),
    "x": (PAULIS["X"], "x"),
    "y": (PAULIS["Y"], "y"),
    "z": (PAULIS["Z"], "z"),
    "h": ([[_HALF, _HALF], [_HALF, -_HALF]], "h"),
    "s": ([[1, 0], [0, 1j]], "sdg"),
    "sdg": ([[1, 0], [0, -1j]], "s"),
    "t": ([[1, 0], [0, _EIGHTH]], "tdg"),
    "tdg": ([[1, 0], [0, _EIGHTH.conjugate()]], "t"),
    "sx": ([[0.5 + 0.5j, 0.5 - 0.5j], [0.5 - 0.5j, 0.5 + 0.5j]], "sxdg"),
    "sxdg": ([[0.5 - 0.5j, 0.5 + 0.5j], [0.5 + 0.5j, 0.5 - 0.5j]], "sx"),
    "swap": ([[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]], "swap"),
    "iswap": ([[1, 0, 0, 0], [0, 0, 1j, 0], [0, 1j, 0, 0], [0, 0, 0, 1]], "iswapdg"),
    "iswapdg": ([[1, 0, 0, 0], [0, 0, -1j, 0], [0, -1j, 0, 0], [0, 0, 0, 1]], "iswap"),
}
_ROTATIONS = {"rx": "X", "ry": "Y", "rz": "Z", "rxx": "XX", "ryy": "YY", "rzz": "ZZ", "rzx": "ZX"}


def _fixed(matrix: ArrayLike) -> Callable[[], ArrayLike]:
    return lambda: matrix


def _fixed_inverse(name: str) -> Callable[[Parameters], tuple[str, Parameters]]:
    return lambda parameters: (_FIXED[name][1], parameters)


def _negated(name: str) -> Callable[[Parameters], tuple[str, Parameters]]:
    return lambda parameters: (name, (-parameters[0],))


def _rotation(pauli_string: str) -> tuple[Callable[[float], Matrix], Callable[[int, float], Matrix]]:
    pauli = pauli_matrix(pauli_string)
    identity = np.eye(len(pauli))

    def build(angle: float) -> Matrix:
        return math.cos(angle / 2) * identity - 1j * math.sin(angle / 2) * pauli

    return build, lambda which, angle: build(angle + math.pi) / 2


def _phase(angle: float) -> Any:
    return [[1, 0], [0, cmath.exp(1j * angle)]]


def _u3(theta: float, phi: float, lam: float) -> Any:
    cos, sin = math.cos(theta / 2), math.sin(theta / 2)
    left, right = cmath.exp(1j * phi), cmath.exp(1j * lam)
    return [[cos, -right * sin], [left * sin, left * right * cos]]


def _u3_derivative(which: int, theta: float, phi: float, lam: float) -> Any:
    if which == 0:
        return np.array(_u3(theta + math.pi, phi, lam)) / 2
    matrix = 1j * np.array(_u3(theta, phi, lam))
    if which == 1:
        matrix[0, :] = 0
    else:
        matrix[:, 0] = 0
    return matrix


def _rot(phi: float, theta: float, omega: float) -> Any:
    return cmath.exp(-0.5j * (phi + omega)) * np.array(_u3(theta, omega, phi))


def _rot_derivative(which: int, phi: float, theta: float, omega: float) -> Any:
    angles = [phi, theta, omega]
    angles[which] += math.pi
    return _rot(*angles) / 2


def _table() -> dict[str, Gate]:
    table: dict[str, Gate] = {}
    for name, (matrix, _) in _FIXED.items():
        array = np.array(matrix)
        table[name] = StandardGate(
            name,
            len(array).bit_length() - 1,
            diagonal=not np.any(array - np.diag(np.diagonal(array))),
            build=_fixed(matrix),
            invert=_fixed_inverse(name),
        )
    half, one = ((-0.5, 0.5),), ((0.0, 1.0),)
    for name, pauli_string in _ROTATIONS.items():
        build, derive = _rotation(pauli_string)
        diag = set(pauli_string) == {"Z"}
        table[name] = StandardGate(name, len(pauli_string), 1, diag, True, half, build, derive, _negated(name))
    table["p"] = StandardGate(
        "p", 1, 1, True, True, one, _phase, lambda which, a: [[0, 0], [0, 1j * cmath.exp(1j * a)]], _negated("p")
    )
    table["gphase"] = StandardGate(
        "gphase",
        0,
        1,
        True,
        True,
        ((1.0,),),
        lambda a: [[cmath.exp(1j * a)]],
        lambda which, a: [[1j * cmath.exp(1j * a)]],
        _negated("gphase"),
    )
    table["u2"] = StandardGate(
        "u2",
        1,
        2,
        spectra=one * 2,
        build=lambda phi, lam: _u3(math.pi / 2, phi, lam),
        derive=lambda which, phi, lam: _u3_derivative(which + 1, math.pi / 2, phi, lam),
        invert=lambda p: ("u2", (-p[1] - math.pi, -p[0] + math.pi)),
    )
    table["u3"] = StandardGate(
        "u3",
        1,
        3,
        spectra=half + one * 2,
        build=_u3,
        derive=_u3_derivative,
        invert=lambda p: ("u3", (-p[0], -p[2], -p[1])),
    )
    table["rot"] = StandardGate(
        "rot",
        1,
        3,
        spectra=half * 3,
        build=_rot,
        derive=_rot_derivative,
        invert=lambda p: ("rot", (-p[2], -p[1], -p[0])),
    )
    return table


GATES: dict[str, Gate] = _table()


@dataclass(frozen=True, eq=False, repr=False)
class Marker(Gate):
    """What is no gate: a measurement, a reset, a barrier, and the end of an unrolled `while` (`unfinished`), which no
    shot may reach with its condition still true. `targets` is 0 where any number of wires will do."""

    def inverse(self, parameters: Parameters) -> tuple[Gate, Parameters]:
        return (self, parameters) if self.name == "barrier" else super().inverse(parameters)

    def __reduce__(self) -> Any:
        return gate, (self.name,)


MEASURE = Marker("measure", 1, unitary=False)
RESET = Marker("reset", 1, unitary=False)
BARRIER = Marker("barrier", 0, unitary=False)
UNFINISHED = Marker("unfinished", 1, unitary=False)
REPETITIONS = 128  # of a `while` on measured bits, which are unrolled
GATES |= {marker.name: marker for marker in (MEASURE, RESET, BARRIER, UNFINISHED)}

CONTROLLED: dict[str, tuple[str, int]] = {  # names of controlled gates: the gate below and how many controls
    "cx": ("x", 1),
    "cnot": ("x", 1),
    "cy": ("y", 1),
    "cz": ("z", 1),
    "ch": ("h", 1),
    "csx": ("sx", 1),
    "cswap": ("swap", 1),
    "ccx": ("x", 2),
    "toffoli": ("x", 2),
    "ccz": ("z", 2),
    "crx": ("rx", 1),
    "cry": ("ry", 1),
    "crz": ("rz", 1),
    "cp": ("p", 1),
    "cu1": ("p", 1),
    "cu3": ("u3", 1),
}

ALIASES = {"u1": "p", "phase": "p", "cphase": "cp", "global_phase": "gphase"}  # other names, of methods of a Circuit
