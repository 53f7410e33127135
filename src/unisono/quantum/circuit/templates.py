"""Circuits that are used often. Each reads weights 0, 1, 2, ... in the order in which its gates stand.

circuit = hardware_efficient(24, depth=10)
circuit = Circuit(24).compose(strongly_entangling(12, layers=2), wires=range(0, 24, 2))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, count, product

import numpy as np

from unisono.errors import UsageError
from unisono.quantum.arguments import require_count
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.parameter import affine, is_index, weight
from unisono.quantum.observables.observable import PauliString, PauliSum, Z, multiply

_MOST_LAYERS = 1 << 20
ENTANGLERS = ("cnot_ring", "cnot_line", "cz_ring", "cz_line")


def hardware_efficient(
    wires: int, depth: int, rotations: Sequence[str] = ("ry", "rz"), entangler: str = "cnot_ring"
) -> Circuit:
    """`depth` layers of rotations on every wire and a ring or line of entangling gates."""
    if not isinstance(entangler, str) or entangler not in ENTANGLERS:
        raise UsageError(f"entangler {entangler!r}: expected one of {', '.join(ENTANGLERS)}")
    _at_least("depth", depth, 0)
    if isinstance(rotations, str) or not isinstance(rotations, Sequence):
        raise UsageError(f"rotations {rotations!r}: expected names of rotations, such as ('ry', 'rz')")
    circuit, index = Circuit(wires), count()
    wires = circuit.wires
    for _ in range(depth):
        for wire in range(wires):
            for rotation in rotations:
                circuit.apply(rotation, wire, weight(next(index)))
        gate, shape = entangler.split("_")
        pairs = [(wire, wire + 1) for wire in range(wires - 1)] + [(wires - 1, 0)] * (shape == "ring" and wires > 2)
        for pair in pairs:
            circuit.apply(gate, pair)
    return circuit


def strongly_entangling(wires: int, layers: int) -> Circuit:
    """Layers of a rotation on every wire and CNOTs to the wire r further on, r = 1, 2, ... from layer to layer."""
    _at_least("layers", layers, 0)
    circuit, index = Circuit(wires), count()
    wires = circuit.wires
    for layer in range(layers):
        for wire in range(wires):
            circuit.rot(wire, weight(next(index)), weight(next(index)), weight(next(index)))
        reach = layer % (wires - 1) + 1 if wires > 1 else 0
        for wire in range(wires if reach else 0):
            circuit.cnot(wire, (wire + reach) % wires)
    return circuit


def maxcut(edges: Iterable[Sequence[float]]) -> PauliSum:
    """The cut of a graph as an observable: sum of strength * (1 - Z Z) / 2 over edges (i, j) or (i, j, strength)."""
    if not isinstance(edges, Iterable) or isinstance(edges, str | bytes) or not getattr(edges, "ndim", 1):
        raise UsageError(f"edges {edges!r}: expected pairs of wires, such as [(0, 1), (1, 2)]")
    total = PauliSum()
    for edge in edges:
        first, second, strength = _edge(edge)
        total = total + strength / 2 * (1 - Z(first) @ Z(second))
    return total


def qaoa(cost: PauliSum | Iterable[Sequence[float]], layers: int, wires: int | None = None) -> Circuit:
    """QAOA for a diagonal cost, or for the maximum cut of the graph with these edges.

    Layer l is exp(-i weight(2l) cost), up to a global phase, then rx(2 weight(2l + 1)) on every wire."""
    cost = cost if isinstance(cost, PauliSum) else maxcut(cost)
    _at_least("layers", layers, 0)
    plain = cost.paulis()
    if not plain.is_diagonal:
        raise UsageError(f"QAOA cost {cost}: expected only Z and the identity")
    circuit = Circuit(max(plain.wires, default=0) + 1 if wires is None else wires)
    plain.check(circuit.wires)
    for wire in range(circuit.wires):
        circuit.h(wire)
    for layer in range(layers):
        for coefficient, pauli_string in plain.terms:
            if pauli_string:
                targets = [wire for wire, _ in pauli_string]
                circuit.pauli_rotation("Z" * len(targets), targets, 2 * coefficient * weight(2 * layer))
        for wire in range(circuit.wires):
            circuit.rx(wire, 2 * weight(2 * layer + 1))
    return circuit


def uccsd(wires: int, electrons: int, steps: int = 1) -> Circuit:
    """Unitary coupled cluster, singles and doubles, in Trotter steps over the Jordan-Wigner strings.

    Wires are spin orbitals, even ones spin up and odd ones down; the first `electrons` start occupied. Excitations keep
    the spin; each has one weight, used in every step (divided by `steps`)."""
    _at_least("steps", steps, 1)
    _at_least("wires", wires, 2)
    if not is_index(electrons) or not 0 < electrons < wires:
        raise UsageError(f"uccsd with {electrons} electrons on {wires} wires: expected 1 to {wires - 1} electrons")
    circuit = Circuit(wires)
    for wire in range(electrons):
        circuit.x(wire)
    for _ in range(steps):
        for index, (holes, particles) in enumerate(excitations(wires, electrons)):
            for coefficient, pauli_string in excitation_strings(holes, particles):
                letters = "".join(pauli for _, pauli in pauli_string)
                angle = -2 * coefficient / steps * weight(index)
                circuit.pauli_rotation(letters, [wire for wire, _ in pauli_string], angle)
    return circuit


def excitations(wires: int, electrons: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(from, to) wires of every single and double excitation that keeps the spin, singles first."""
    found = []
    for size in (1, 2):
        pairs = product(combinations(range(electrons), size), combinations(range(electrons, wires), size))
        found += [(a, b) for a, b in pairs if sorted(wire % 2 for wire in a) == sorted(wire % 2 for wire in b)]
    return found


def excitation_strings(holes: Sequence[int], particles: Sequence[int]) -> list[tuple[float, PauliString]]:
    """(coefficient, Pauli string) with T - T^+ = i * sum of coefficient * Pauli string, T exciting `holes` to
    `particles`."""
    parts: list[tuple[complex, PauliString]] = [(1 + 0j, ())]
    for wire, sign in [*((wire, -1j) for wire in particles), *((wire, 1j) for wire in reversed(holes))]:
        string = tuple((below, "Z") for below in range(wire))
        ladder = [(0.5 + 0j, (*string, (wire, "X"))), (0.5 * sign, (*string, (wire, "Y")))]
        parts = _product(parts, ladder)
    return [(2 * value.imag, pauli_string) for value, pauli_string in parts if abs(value.imag) > 1e-12]


def _product(
    left: list[tuple[complex, PauliString]], right: list[tuple[complex, PauliString]]
) -> list[tuple[complex, PauliString]]:
    total: dict[PauliString, complex] = {}
    for (a, first), (b, second) in product(left, right):
        factor, pauli_string = multiply(first, second)
        total[pauli_string] = total.get(pauli_string, 0) + a * b * factor
    return [(value, pauli_string) for pauli_string, value in total.items()]


def _edge(edge: Sequence[float]) -> tuple[int, int, float]:
    is_sequence = isinstance(edge, Sequence) or (isinstance(edge, np.ndarray) and edge.ndim == 1)
    pair = is_sequence and not isinstance(edge, str | bytes) and len(edge) in (2, 3) and all(map(_is_wire, edge[:2]))
    if not pair or edge[0] == edge[1]:
        raise UsageError(f"edge {edge!r}: expected two different wires, and a strength if it is not 1")
    return int(edge[0]), int(edge[1]), affine(edge[2]).constant if len(edge) == 3 else 1.0


def _is_wire(wire: object) -> bool:
    """A whole number, also as a float: edges with strengths come in arrays of floats."""
    return is_index(wire) or (isinstance(wire, float | np.floating) and wire.is_integer())


def _at_least(name: str, value: int, least: int) -> None:
    require_count(name, value, least, _MOST_LAYERS)
