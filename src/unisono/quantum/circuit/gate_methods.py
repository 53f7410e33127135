"""The methods that add gates to a circuit; each returns the circuit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from unisono.errors import UsageError
from unisono.quantum.circuit import gates
from unisono.quantum.circuit.gates import Gate
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Angle, affine, in_order, is_index

if TYPE_CHECKING:
    from typing import Self


_MOST_BITS = 1 << 20


class GateMethods:
    """Mixed into Circuit, which has `wires`, `bits`, `append` and `apply`."""

    wires: int
    bits: int

    if TYPE_CHECKING:

        def append(self, operation: Operation) -> Self: ...

        def apply(
            self,
            kind: str | Gate,
            targets: int | Sequence[int] = (),
            *angles: Angle,
            controls: Mapping[int, int] | Sequence[int] = (),
            condition: Mapping[int, int] | None = None,
        ) -> Self: ...

    def id(self, wire: int) -> Self:
        return self.apply("id", wire)

    def x(self, wire: int) -> Self:
        return self.apply("x", wire)

    def y(self, wire: int) -> Self:
        return self.apply("y", wire)

    def z(self, wire: int) -> Self:
        return self.apply("z", wire)

    def h(self, wire: int) -> Self:
        return self.apply("h", wire)

    def s(self, wire: int) -> Self:
        return self.apply("s", wire)

    def sdg(self, wire: int) -> Self:
        return self.apply("sdg", wire)

    def t(self, wire: int) -> Self:
        return self.apply("t", wire)

    def tdg(self, wire: int) -> Self:
        return self.apply("tdg", wire)

    def sx(self, wire: int) -> Self:
        return self.apply("sx", wire)

    def sxdg(self, wire: int) -> Self:
        return self.apply("sxdg", wire)

    def rx(self, wire: int, angle: Angle) -> Self:
        return self.apply("rx", wire, angle)

    def ry(self, wire: int, angle: Angle) -> Self:
        return self.apply("ry", wire, angle)

    def rz(self, wire: int, angle: Angle) -> Self:
        return self.apply("rz", wire, angle)

    def p(self, wire: int, angle: Angle) -> Self:
        """diag(1, exp(i angle)); also known as u1 and phase."""
        return self.apply("p", wire, angle)

    u1 = phase = p

    def u2(self, wire: int, phi: Angle, lam: Angle) -> Self:
        return self.apply("u2", wire, phi, lam)

    def u3(self, wire: int, theta: Angle, phi: Angle, lam: Angle) -> Self:
        """p(phi) ry(theta) p(lam), the rightmost first."""
        return self.apply("u3", wire, theta, phi, lam)

    def rot(self, wire: int, phi: Angle, theta: Angle, omega: Angle) -> Self:
        """rz(omega) ry(theta) rz(phi), the rightmost first."""
        return self.apply("rot", wire, phi, theta, omega)

    def cnot(self, control: int, target: int) -> Self:
        return self.apply("cx", (control, target))

    cx = cnot

    def cy(self, control: int, target: int) -> Self:
        return self.apply("cy", (control, target))

    def cz(self, control: int, target: int) -> Self:
        return self.apply("cz", (control, target))

    def ch(self, control: int, target: int) -> Self:
        return self.apply("ch", (control, target))

    def swap(self, first: int, second: int) -> Self:
        return self.apply("swap", (first, second))

    def iswap(self, first: int, second: int) -> Self:
        return self.apply("iswap", (first, second))

    def cswap(self, control: int, first: int, second: int) -> Self:
        return self.apply("cswap", (control, first, second))

    def toffoli(self, first: int, second: int, target: int) -> Self:
        return self.apply("ccx", (first, second, target))

    ccx = toffoli

    def crx(self, control: int, target: int, angle: Angle) -> Self:
        return self.apply("crx", (control, target), angle)

    def cry(self, control: int, target: int, angle: Angle) -> Self:
        return self.apply("cry", (control, target), angle)

    def crz(self, control: int, target: int, angle: Angle) -> Self:
        return self.apply("crz", (control, target), angle)

    def cphase(self, control: int, target: int, angle: Angle) -> Self:
        return self.apply("cp", (control, target), angle)

    cp = cu1 = cphase

    def cu3(self, control: int, target: int, theta: Angle, phi: Angle, lam: Angle) -> Self:
        return self.apply("cu3", (control, target), theta, phi, lam)

    def rxx(self, first: int, second: int, angle: Angle) -> Self:
        return self.apply("rxx", (first, second), angle)

    def ryy(self, first: int, second: int, angle: Angle) -> Self:
        return self.apply("ryy", (first, second), angle)

    def rzz(self, first: int, second: int, angle: Angle) -> Self:
        return self.apply("rzz", (first, second), angle)

    def rzx(self, first: int, second: int, angle: Angle) -> Self:
        """exp(-i angle/2 Z(first) X(second))."""
        return self.apply("rzx", (first, second), angle)

    def pauli_rotation(self, pauli_string: str, wires: Sequence[int], angle: Angle) -> Self:
        """exp(-i angle/2 P), P such as "XYZ" with a Pauli for each wire; "I" Paulis are allowed."""
        ordered = self._order(wires)
        if not isinstance(pauli_string, str) or len(pauli_string) != len(ordered) or set(pauli_string) - set("IXYZ"):
            raise UsageError(
                f"Pauli string {pauli_string!r} on {len(ordered)} wires: expected one of I, X, Y, Z for each wire"
            )
        pairs = [(pauli, wire) for pauli, wire in zip(pauli_string, ordered, strict=True) if pauli != "I"]
        if not pairs:
            return self.global_phase(affine(angle) * -0.5)
        kind = gates.pauli_rotation("".join(pauli for pauli, _ in pairs))
        return self.apply(kind, [wire for _, wire in pairs], angle)

    def unitary(self, matrix: ArrayLike, wires: int | Sequence[int]) -> Self:
        """An explicit unitary; the first wire is the most significant bit of its index."""
        return self.apply(gates.unitary(matrix), wires)

    def diagonal(self, entries: ArrayLike, wires: int | Sequence[int]) -> Self:
        return self.apply(gates.diagonal(entries), wires)

    def global_phase(self, angle: Angle) -> Self:
        """Multiply the state by exp(i angle)."""
        return self.apply("gphase", (), angle)

    def measure(self, wire: int, bit: int | None = None) -> Self:
        """Measure in the middle of the circuit into a classical bit (default: a new one)."""
        bit = self.bits if bit is None else bit
        if not is_index(bit) or not 0 <= bit < _MOST_BITS:
            raise UsageError(f"measure into bit {bit!r}: expected an index of 0 to {_MOST_BITS - 1}")
        before, self.bits = self.bits, max(self.bits, int(bit) + 1)
        try:
            return self.append(Operation(gates.MEASURE, (wire,), bits=(int(bit),)))
        except UsageError:
            self.bits = before
            raise

    def measure_all(self) -> Self:
        """Measure every wire w into bit w."""
        for wire in range(self.wires):
            self.measure(wire, wire)
        return self

    def reset(self, wire: int) -> Self:
        """Put a wire back to |0>."""
        return self.append(Operation(gates.RESET, (wire,)))

    def barrier(self, *wires: int) -> Self:
        """Keep what stands before it before, on these wires (default: all)."""
        return self.append(Operation(gates.BARRIER, wires or tuple(range(self.wires))))

    def cnot_line(self, wires: Iterable[int] | None = None) -> Self:
        """CNOTs from each wire to the next."""
        order = self._order(wires)
        self._refuse_repeated(pairwise(order), order)
        for control, target in pairwise(order):
            self.cnot(control, target)
        return self

    def cnot_ring(self, wires: Iterable[int] | None = None) -> Self:
        """CNOTs from each wire to the next, and from the last to the first (with two wires: one CNOT)."""
        order = self._order(wires)
        self._refuse_repeated(pairwise((*order, order[0]) if len(order) > 2 else order), order)
        self.cnot_line(order)
        return self.cnot(order[-1], order[0]) if len(order) > 2 else self

    def qft(self, wires: Iterable[int] | None = None, swaps: bool = True) -> Self:
        """The quantum Fourier transform, the first wire most significant; `swaps=False` leaves the bits reversed."""
        order = self._order(wires)
        self._refuse_repeated(combinations(order, 2), order)
        if not isinstance(swaps, bool):
            raise UsageError(f"qft(swaps={swaps!r}): expected True or False")
        for position, wire in enumerate(order):
            self.h(wire)
            for distance, control in enumerate(order[position + 1 :], start=2):
                self.cphase(control, wire, 2 * math.pi / 2**distance)
        if swaps:
            for first, second in zip(order[: len(order) // 2], reversed(order), strict=False):
                self.swap(first, second)
        return self

    def _order(self, wires: Iterable[int] | None) -> list[int]:
        """Wires of this circuit; all of them where none are named."""
        if wires is None:
            return [*range(self.wires)]
        try:
            order = in_order(wires)
        except TypeError:
            raise UsageError(f"wires {wires!r}: expected several wires, such as range(4), or None for all") from None
        for wire in order:
            if not is_index(wire) or not 0 <= wire < self.wires:
                raise UsageError(f"wire {wire!r}: the circuit has wires 0 to {self.wires - 1}")
        return [*map(int, order)]

    @staticmethod
    def _refuse_repeated(pairs: Iterable[tuple[int, int]], order: Sequence[int]) -> None:
        """Before the first gate is added: what is refused leaves the circuit as it was."""
        for first, second in pairs:
            if first == second:
                raise UsageError(
                    f"wires {', '.join(map(str, order))}: wire {first} would be its own partner; name it once"
                )
