"""Circuits of Cirq as circuits of unisono.

    circuit = uq.from_cirq(cirq_circuit)      # qubit i of sorted(circuit.all_qubits()) is wire i, symbol i is weight(i)

Powers of gates become rotations by pi times the exponent, with the global phase that Cirq gives them, so exponents may
have symbols and gates may be under controls. Gates that are not in the table are taken as matrices if they are small,
else by Cirq's decomposition. In both libraries the first qubit is the most significant bit.
"""

from __future__ import annotations

import cmath
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unisono.errors import MissingPackageError, UsageError
from unisono.quantum.arguments import shown
from unisono.quantum.circuit.channels import MOST_WIRES, kraus
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import Gate, gate, unitary
from unisono.quantum.circuit.operation import Controls, Operation
from unisono.quantum.circuit.parameter import Affine, feature, weight

SMALL = 3  # qubits of a gate without symbols that is taken as a matrix
MOST_MATRIX = 8  # the same for one without a decomposition
_NAMED = {  # powers that have a name
    ("z", 0.5): "s", ("z", -0.5): "sdg", ("z", 0.25): "t", ("z", -0.25): "tdg", ("x", 0.5): "sx", ("x", -0.5): "sxdg",
}  # fmt: skip

Parts = Iterable[tuple[str, Sequence[int], Sequence[int], Sequence[Affine]]]  # gate, targets, controls, angles


def from_cirq(circuit: Any, *, features: Sequence[Any] = ()) -> Circuit:
    """A cirq.Circuit as a Circuit: qubit i of sorted(circuit.all_qubits()) is wire i, as in Cirq's simulators.

    Symbol i of sorted(cirq.parameter_names(circuit)) is weight(i); those named in `features`, as sympy's Symbols or by
    name, are feature(0), feature(1), ... instead, and are left out of that count. Exponents and angles must be affine
    in the symbols. Measurements write bits in the order of the circuit, those of a key in that of its qubits."""
    if importlib.util.find_spec("cirq") is None:
        raise MissingPackageError("cirq-core", "from_cirq", "cirq")
    import cirq

    if not isinstance(circuit, cirq.AbstractCircuit):
        raise UsageError(f"from_cirq of {shown(circuit)}: expected a cirq.Circuit")
    try:
        circuit = cirq.unroll_circuit_op(circuit.unfreeze(), deep=True, tags_to_check=None)
    except ValueError as error:  # of repeat_until, and of repetitions that are symbols
        raise UsageError(f"from_cirq: {error}; expected subcircuits with a number of repetitions") from None
    qubits = sorted(circuit.all_qubits())
    if not qubits:
        raise UsageError("from_cirq of a circuit without qubits: expected 1 or more")
    for qubit in qubits:
        if qubit.dimension != 2:
            raise UsageError(f"from_cirq: {qubit} has {qubit.dimension} levels; expected qubits, which have 2")
    bits: dict[str, tuple[int, ...]] = {}
    count = 0
    for operation in circuit.all_operations():
        for key in sorted(cirq.measurement_key_names(operation)):
            if key in bits:
                raise UsageError(f"from_cirq: {key!r} is measured twice; give each measurement a key of its own")
            size = len(operation.qubits) if isinstance(operation.gate, cirq.MeasurementGate) else 1
            bits[key] = tuple(range(count, count + size))
            count += size
    made = Circuit(len(qubits), count)
    reader = _Reader(made, {qubit: wire for wire, qubit in enumerate(qubits)}, bits, _symbols(circuit, features))
    for operation in circuit.all_operations():
        reader.read(operation, (), ())
    return made


def _symbols(circuit: Any, features: Sequence[Any]) -> dict[str, Affine]:
    """The weight or feature that each symbol is."""
    import cirq

    names = sorted(cirq.parameter_names(circuit))
    inputs = [getattr(each, "name", each) for each in features]
    for name in inputs:
        if name not in names:
            raise UsageError(f"features: {name!r} is no symbol of the circuit; it has {', '.join(names) or 'none'}")
    found = {name: weight(number) for number, name in enumerate(name for name in names if name not in inputs)}
    return found | {name: feature(number) for number, name in enumerate(inputs)}


class _Reader:
    def __init__(
        self,
        made: Circuit,
        wire_of: Mapping[Any, int],
        bits: Mapping[str, tuple[int, ...]],
        symbols: Mapping[str, Affine],
    ) -> None:
        self.made, self.wire_of, self.bits, self.symbols = made, wire_of, bits, symbols
        self.table = _table()

    def read(self, operation: Any, controls: Controls, condition: Controls) -> None:
        """One operation, under controls and a condition."""
        import cirq

        operation = operation.untagged
        if operation.classical_controls:
            asked = tuple(self.asked(each) for each in operation.classical_controls)
            self.read(operation.without_classical_controls(), controls, (*condition, *asked))
            return
        wires = tuple(self.wire_of[qubit] for qubit in operation.qubits)
        kind = operation.gate
        if isinstance(operation, cirq.ControlledOperation):
            on = tuple(self.wire_of[qubit] for qubit in operation.controls)
            for values in operation.control_values.expand():
                self.read(operation.sub_operation, (*controls, *zip(on, values, strict=True)), condition)
        elif isinstance(kind, cirq.ControlledGate):
            count = kind.num_controls()
            inner = kind.sub_gate.on(*operation.qubits[count:])
            for values in kind.control_values.expand():
                self.read(inner, (*controls, *zip(wires[:count], values, strict=True)), condition)
        elif isinstance(kind, cirq.MeasurementGate):
            self.measure(kind, wires, condition)
        elif isinstance(kind, cirq.ResetChannel):
            self.add(gate("reset"), wires, (), (), condition)
        elif isinstance(kind, (cirq.IdentityGate, cirq.WaitGate)):
            return
        elif (parts := self.parts(kind)) is not None:
            for name, targets, own, angles in parts:
                more = (*controls, *[(wires[each], 1) for each in own])
                self.add(gate(name), tuple(wires[each] for each in targets), more, tuple(angles), condition)
        else:
            self.other(operation, wires, controls, condition)

    def parts(self, kind: Any) -> Parts | None:
        """The gates of a gate in the table."""
        rule = next((rule for each, rule in self.table if isinstance(kind, each)), None)
        return None if rule is None else rule(kind, self.angle)

    def other(self, operation: Any, wires: tuple[int, ...], controls: Controls, condition: Controls) -> None:
        import cirq

        has_symbols = cirq.is_parameterized(operation)
        matrix = None
        if not has_symbols and len(wires) <= MOST_MATRIX:
            matrix = cirq.unitary(operation, None)
        if matrix is not None and len(wires) <= SMALL:
            self.add(unitary(matrix), wires, controls, (), condition)
            return
        inner = cirq.decompose_once(operation, None)
        if inner is not None and all(set(each.qubits) <= set(operation.qubits) for each in inner):
            if controls and not _is_exact(operation, inner):
                raise UsageError(f"{operation} under controls: Cirq decomposes it up to a phase only; give its matrix")
            for each in inner:
                self.read(each, controls, condition)
        elif matrix is not None:
            self.add(unitary(matrix), wires, controls, (), condition)
        elif not has_symbols and len(wires) <= MOST_WIRES and cirq.has_kraus(operation) and not controls:
            self.add(kraus(cirq.kraus(operation)), wires, (), (), condition)
        else:
            raise UsageError(
                f"operation {shown(operation)}: expected gates, channels on at most {MOST_WIRES} qubits, measurements, "
                "resets and conditions on bits; decompose it first"
            )

    def measure(self, kind: Any, wires: tuple[int, ...], condition: Controls) -> None:
        """A key's qubits; the bits that Cirq inverts are those of flipped qubits."""
        if kind.confusion_map:
            raise UsageError(f"measurement {kind.key!r} has a confusion map; use uq's readout errors instead")
        flipped = [wire for wire, flip in zip(wires, kind.full_invert_mask(), strict=True) if flip]
        for wire in flipped:
            self.add(gate("x"), (wire,), (), (), condition)
        for wire, bit in zip(wires, self.bits[kind.key], strict=True):
            self.made.append(Operation(gate("measure"), (wire,), bits=(bit,), condition=condition))
        for wire in flipped:
            self.add(gate("x"), (wire,), (), (), condition)

    def asked(self, condition: Any) -> tuple[int, int]:
        """The bit that a classical control asks to be 1."""
        import cirq

        if isinstance(condition, cirq.KeyCondition):
            bits = self.bits.get(condition.key.name, ())
            if len(bits) == 1:
                return bits[0], 1
        raise UsageError(f"classical control {condition}: expected the key of a measurement of one qubit")

    def add(
        self, kind: Gate, targets: tuple[int, ...], controls: Controls, angles: tuple[Affine, ...], condition: Controls
    ) -> None:
        self.made.append(Operation(kind, targets, controls, angles, condition=condition))

    def angle(self, given: Any) -> Affine:
        """A number or an expression of sympy as an angle."""
        symbols = sorted(getattr(given, "free_symbols", ()), key=str)
        total = Affine(float(given.subs(dict.fromkeys(symbols, 0)) if symbols else given))
        for symbol in symbols:
            slope = given.diff(symbol)
            if slope.free_symbols:
                raise UsageError(
                    f"angle {given}: expected an expression that is affine in the circuit's symbols; resolve "
                    f"{symbol.name!r} to a number first"
                )
            total = total + self.symbols[symbol.name] * float(slope)
        return total


Angle = Callable[[Any], Affine]
_NONE = Affine()


def _table() -> list[tuple[Any, Callable[[Any, Angle], Parts]]]:
    """By Cirq's classes: a gate as gates on its qubits. A power's phase is exp(i pi exponent shift)."""
    import cirq

    return [
        (cirq.XPowGate, lambda kind, angle: _single("x", 0.5, kind, angle)),
        (cirq.YPowGate, lambda kind, angle: _single("y", 0.5, kind, angle)),
        (cirq.ZPowGate, lambda kind, angle: _single("z", 0.0, kind, angle)),
        (cirq.CXPowGate, lambda kind, angle: _controlled("x", 0.5, 1, kind, angle)),
        (cirq.CZPowGate, lambda kind, angle: _controlled("z", 0.0, 1, kind, angle)),
        (cirq.CCXPowGate, lambda kind, angle: _controlled("x", 0.5, 2, kind, angle)),
        (cirq.CCZPowGate, lambda kind, angle: _controlled("z", 0.0, 2, kind, angle)),
        (cirq.HPowGate, _hadamard),
        (cirq.SwapPowGate, lambda kind, angle: _pairs({"rxx": 0.5, "ryy": 0.5, "rzz": 0.5}, 0.25, kind, angle, "swap")),
        (cirq.ISwapPowGate, lambda kind, angle: _pairs({"rxx": -0.5, "ryy": -0.5}, 0.0, kind, angle, "iswap")),
        (cirq.XXPowGate, lambda kind, angle: _pairs({"rxx": 1.0}, 0.5, kind, angle)),
        (cirq.YYPowGate, lambda kind, angle: _pairs({"ryy": 1.0}, 0.5, kind, angle)),
        (cirq.ZZPowGate, lambda kind, angle: _pairs({"rzz": 1.0}, 0.5, kind, angle)),
        (cirq.CSwapGate, lambda kind, angle: [("swap", (1, 2), (0,), ())]),
        (cirq.FSimGate, _fsim),
        (cirq.PhasedXPowGate, _phased_x),
        (cirq.GlobalPhaseGate, _global_phase),
    ]


def _phase(angle: Affine, controls: Sequence[int] = ()) -> Parts:
    return [] if angle == _NONE else [("gphase", (), controls, (angle,))]


def _single(name: str, shift: float, kind: Any, angle: Angle, target: int = 0, controls: Sequence[int] = ()) -> Parts:
    """A power of a Pauli matrix, without its global shift if it has controls: that is not under them."""
    turn = angle(kind.exponent)
    own = 0.0 if controls else kind.global_shift
    exact = name if turn == Affine(1.0) else _NAMED.get((name, turn.constant)) if turn.is_constant else None
    if exact is not None and not own:
        return [(exact, (target,), controls, ())]
    rotation = "p" if name == "z" else f"r{name}"
    return [(rotation, (target,), controls, (turn * math.pi,)), *_phase(turn * (math.pi * (own + shift)), controls)]


def _controlled(name: str, shift: float, count: int, kind: Any, angle: Angle) -> Parts:
    inner = _single(name, shift, kind, angle, count, range(count))
    return [*inner, *_phase(angle(kind.exponent) * (math.pi * kind.global_shift))]


def _hadamard(kind: Any, angle: Angle) -> Parts:
    """A Hadamard gate is Z between rotations about Y."""
    turn = angle(kind.exponent)
    phase = _phase(turn * (math.pi * kind.global_shift))
    if turn == Affine(1.0):
        return [("h", (0,), (), ()), *phase]
    quarter = Affine(math.pi / 4)
    return [("ry", (0,), (), (-quarter,)), ("p", (0,), (), (turn * math.pi,)), ("ry", (0,), (), (quarter,)), *phase]


def _pairs(rotations: Mapping[str, float], shift: float, kind: Any, angle: Angle, name: str = "") -> Parts:
    """A power of a gate that is a product of rotations about XX, YY and ZZ, which commute."""
    turn = angle(kind.exponent)
    if name and turn == Affine(1.0) and not kind.global_shift:
        return [(name, (0, 1), (), ())]
    parts = [(each, (0, 1), (), (turn * (math.pi * factor),)) for each, factor in rotations.items()]
    return [*parts, *_phase(turn * (math.pi * (kind.global_shift + shift)))]


def _fsim(kind: Any, angle: Angle) -> Parts:
    theta, phi = angle(kind.theta), angle(kind.phi)
    return [("rxx", (0, 1), (), (theta,)), ("ryy", (0, 1), (), (theta,)), ("p", (1,), (0,), (-phi,))]


def _phased_x(kind: Any, angle: Angle) -> Parts:
    """A power of X between rotations about Z."""
    before = angle(kind.phase_exponent) * math.pi
    inner = _single("x", 0.5, kind, angle)
    return [("p", (0,), (), (-before,)), *inner, ("p", (0,), (), (before,))]


def _global_phase(kind: Any, angle: Angle) -> Parts:
    if getattr(kind.coefficient, "free_symbols", ()):
        raise UsageError(f"global phase {kind.coefficient}: expected a number; resolve its symbols first")
    return _phase(Affine(cmath.phase(complex(kind.coefficient))))


def _is_exact(operation: Any, inner: Iterable[Any]) -> bool:
    """Whether a decomposition has the gate's own phase, which matters under controls; tried with some numbers."""
    import cirq

    if len(operation.qubits) > MOST_MATRIX:
        return False
    names = sorted(cirq.parameter_names(operation))
    values = dict(zip(names, np.random.default_rng(0).uniform(-1, 1, len(names)), strict=True))
    whole = cirq.unitary(cirq.resolve_parameters(operation, values), None)
    parts = cirq.Circuit(cirq.resolve_parameters(each, values) for each in inner)
    if whole is None or not cirq.has_unitary(parts):
        return False
    return np.allclose(
        whole, parts.unitary(qubit_order=operation.qubits, qubits_that_should_be_present=operation.qubits)
    )
