"""Circuits of Qiskit as circuits of unisono.

    circuit = uq.from_qiskit(qiskit_circuit)      # qubit i is wire i, clbit i is bit i, parameter i is weight(i)

Gates of the table, under any controls, are taken as they are; all others are replaced by their definitions, and those
without one by their matrices. In Qiskit the first qubit of a matrix is its least significant bit; here it is the most
significant one.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unisono.errors import MissingPackageError, UsageError
from unisono.quantum.arguments import shown
from unisono.quantum.circuit.channels import MOST_WIRES, kraus
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import Gate, diagonal, gate, unitary
from unisono.quantum.circuit.operation import Controls, Operation
from unisono.quantum.circuit.parameter import Affine, feature, weight

MOST_MATRIX = 8  # qubits of a gate without definition that is taken as a matrix
_SAME = ["id", "x", "y", "z", "h", "s", "sdg", "t", "tdg", "sx", "sxdg", "rx", "ry", "rz", "p", "u2", "u3"]
_SAME += ["swap", "iswap", "rxx", "ryy", "rzz", "rzx"]
_GATES = {name: name for name in _SAME} | {"u": "u3", "u1": "p"}


def from_qiskit(circuit: Any, *, features: Sequence[Any] = ()) -> Circuit:
    """A qiskit.QuantumCircuit as a Circuit: qubit i is wire i, and clbit i is bit i.

    Parameter i of `circuit.parameters` (Qiskit sorts them by name) is weight(i); those named in `features`, as
    Parameters or by name, are feature(0), feature(1), ... instead, and are left out of that count. Angles must be
    affine in the parameters."""
    if importlib.util.find_spec("qiskit") is None:
        raise MissingPackageError("qiskit", "from_qiskit", "qiskit")
    from qiskit import QuantumCircuit

    if not isinstance(circuit, QuantumCircuit):
        raise UsageError(f"from_qiskit of {shown(circuit)}: expected a qiskit.QuantumCircuit")
    if not circuit.num_qubits:
        raise UsageError("from_qiskit of a circuit without qubits: expected 1 or more")
    made = Circuit(circuit.num_qubits, circuit.num_clbits)
    reader = _Reader(made, _angles(circuit, features))
    wires = {bit: number for number, bit in enumerate(circuit.qubits)}
    bits = {bit: number for number, bit in enumerate(circuit.clbits)}
    reader.read(circuit, wires, bits, (), ())
    return made


def _angles(circuit: Any, features: Sequence[Any]) -> dict[Any, Affine]:
    """The weight or feature that each parameter is."""
    by_name = {parameter.name: parameter for parameter in circuit.parameters}
    names = [getattr(each, "name", each) for each in features]
    for name in names:
        if name not in by_name:
            raise UsageError(
                f"features: {name!r} is no parameter of the circuit; it has {', '.join(by_name) or 'none'}"
            )
    rest = [parameter for parameter in circuit.parameters if parameter.name not in names]
    found = {parameter: weight(number) for number, parameter in enumerate(rest)}
    return found | {by_name[name]: feature(number) for number, name in enumerate(names)}


class _Reader:
    def __init__(self, made: Circuit, angle_of: Mapping[Any, Affine]) -> None:
        self.made, self.angle_of = made, angle_of

    def read(
        self, circuit: Any, wires: Mapping[Any, int], bits: Mapping[Any, int], controls: Controls, condition: Controls
    ) -> None:
        """All instructions of a circuit, or of a gate's definition under controls, or of a branch under a condition."""
        phase = self.angle(circuit.global_phase)
        if phase != Affine():
            self.add(gate("gphase"), (), controls, (phase,), condition)
        for instruction in circuit.data:
            on = tuple(wires[qubit] for qubit in instruction.qubits)
            into = tuple(bits[clbit] for clbit in instruction.clbits)
            self.instruction(instruction.operation, on, into, controls, condition, bits)

    def instruction(
        self,
        operation: Any,
        wires: tuple[int, ...],
        into: tuple[int, ...],
        controls: Controls,
        condition: Controls,
        bits: Mapping[Any, int],
    ) -> None:
        from qiskit.circuit import ControlFlowOp

        name = operation.name
        if name == "delay":
            return
        if name in ("barrier", "reset", "measure"):
            written = into if name == "measure" else ()
            self.made.append(
                Operation(gate(name), wires, bits=written, condition=() if name == "barrier" else condition)
            )
        elif isinstance(operation, ControlFlowOp):
            self.branch(operation, wires, into, condition, bits)
        elif into and getattr(operation, "definition", None) is None:
            raise UsageError(f"instruction {name!r}: expected gates, measurements, resets and if_test on bits")
        else:
            self.gate(operation, wires, into, controls, condition)

    def gate(
        self, operation: Any, wires: tuple[int, ...], into: tuple[int, ...], controls: Controls, condition: Controls
    ) -> None:
        from qiskit.circuit import AnnotatedOperation, ControlledGate

        name = operation.name
        if isinstance(operation, ControlledGate):
            count = operation.num_ctrl_qubits
            values = [operation.ctrl_state >> number & 1 for number in range(count)]
            more = (*controls, *zip(wires[:count], values, strict=True))
            if operation.base_gate.name == "u" and len(operation.params) == 4:  # cu: a phase of its own
                self.add(gate("gphase"), (), more, (self.angle(operation.params[3]),), condition)
            self.gate(operation.base_gate, wires[count:], (), more, condition)
        elif isinstance(operation, AnnotatedOperation) and (found := _controls_of(operation)) is not None:
            base, values = found
            more = (*controls, *zip(wires[: len(values)], values, strict=True))
            self.gate(base, wires[len(values) :], (), more, condition)
        elif name in _GATES and _is_standard(operation):
            kind = gate(_GATES[name])
            angles = tuple(self.angle(each) for each in operation.params[: kind.parameters])
            self.add(kind, wires, controls, angles, condition)
        elif name == "global_phase":
            self.add(gate("gphase"), (), controls, (self.angle(operation.params[0]),), condition)
        elif name == "unitary":
            self.add(unitary(operation.params[0]), wires[::-1], controls, (), condition)
        elif name == "diagonal":
            self.add(diagonal(operation.params), wires[::-1], controls, (), condition)
        elif (inside := getattr(operation, "definition", None)) is not None:
            on = dict(zip(inside.qubits, wires, strict=True))
            self.read(inside, on, dict(zip(inside.clbits, into, strict=True)), controls, condition)
        elif name == "kraus" and not controls:
            self.add(_channel(operation), wires[::-1], (), (), condition)
        else:
            self.add(_matrix_gate(operation), wires[::-1], controls, (), condition)

    def branch(
        self,
        operation: Any,
        wires: tuple[int, ...],
        into: tuple[int, ...],
        condition: Controls,
        bits: Mapping[Any, int],
    ) -> None:
        """if_test on bits or registers, and for loops."""
        inside = [
            (block, dict(zip(block.qubits, wires, strict=True)), dict(zip(block.clbits, into, strict=True)))
            for block in operation.blocks
        ]
        if operation.name == "for_loop":
            indices, parameter, body = operation.params
            for index in indices:
                block = body if parameter is None else body.assign_parameters({parameter: index})
                on, local = dict(zip(block.qubits, wires, strict=True)), dict(zip(block.clbits, into, strict=True))
                self.read(block, on, local, (), condition)
            return
        if operation.name != "if_else" or not isinstance(operation.condition, tuple):
            raise UsageError(
                f"{operation.name} of {shown(getattr(operation, 'condition', operation.name))}: expected if_test with "
                "(clbit, value) or (register, value), or a for loop"
            )
        asked = _asked(operation.condition, bits)
        if len(inside) == 2 and len(asked) > 1:
            raise UsageError("if_test on a register with an else branch: expected a single bit where there is an else")
        for number, (block, on, local) in enumerate(inside):
            pairs = tuple((bit, value ^ number) for bit, value in asked)
            if {bit for bit, _ in pairs} & _written(block, local):
                raise UsageError("if_test whose branch measures into the bits that it asks for: use other bits")
            if _agree(condition, pairs):
                self.read(block, on, local, (), (*condition, *[each for each in pairs if each not in condition]))

    def add(
        self, kind: Gate, targets: tuple[int, ...], controls: Controls, angles: tuple[Affine, ...], condition: Controls
    ) -> None:
        self.made.append(Operation(kind, targets, controls, angles, condition=condition))

    def angle(self, given: Any) -> Affine:
        """A number or an expression of parameters as an angle."""
        parameters = getattr(given, "parameters", ())
        total = Affine(float(given.bind(dict.fromkeys(parameters, 0.0))) if parameters else float(given))
        for parameter in parameters:
            slope = given.gradient(parameter)
            if getattr(slope, "parameters", ()):
                raise UsageError(
                    f"angle {given}: expected an expression that is affine in the circuit's parameters; assign "
                    f"{parameter.name!r} a number first"
                )
            total = total + self.angle_of[parameter] * float(slope)
        return total


def _controls_of(operation: Any) -> tuple[Any, list[int]] | None:
    """The gate under the controls and inverses of an annotated operation, and the values of the controls; None where it
    has other modifiers."""
    from qiskit.circuit import ControlModifier, InverseModifier

    base = operation.base_op
    values: list[int] = []
    for modifier in operation.modifiers:  # the innermost first; its controls come last
        if isinstance(modifier, ControlModifier):
            values[:0] = [modifier.ctrl_state >> number & 1 for number in range(modifier.num_ctrl_qubits)]
        elif isinstance(modifier, InverseModifier):
            base = base.inverse()
        else:
            return None
    return base, values


@functools.cache
def _standard() -> dict[str, type]:
    from qiskit.circuit.library import get_standard_gate_name_mapping

    return {name: each.base_class for name, each in get_standard_gate_name_mapping().items()}


def _is_standard(operation: Any) -> bool:
    """Whether it is Qiskit's gate of that name, and not one that a user has called so."""
    return getattr(operation, "base_class", None) is _standard().get(operation.name)


def _asked(condition: Any, bits: Mapping[Any, int]) -> Controls:
    what, value = condition
    if what in bits:
        return ((bits[what], int(value)),)
    return tuple((bits[bit], int(value) >> number & 1) for number, bit in enumerate(what))


def _agree(outer: Controls, inner: Iterable[tuple[int, int]]) -> bool:
    known = dict(outer)
    return all(known.get(bit, value) == value for bit, value in inner)


def _written(block: Any, bits: Mapping[Any, int]) -> set[int]:
    """The bits that a branch, or a branch within it, may measure into."""
    return {bits[bit] for each in block.data if each.operation.name != "if_else" for bit in each.clbits} | {
        bit
        for each in block.data
        for inner in getattr(each.operation, "blocks", ())
        for bit in _written(inner, dict(zip(inner.clbits, [bits[c] for c in each.clbits], strict=True)))
    }


def _channel(operation: Any) -> Gate:
    """A channel of qiskit.quantum_info, whose instruction holds its Kraus operators."""
    if operation.num_qubits > MOST_WIRES:
        raise UsageError(f"a channel on {operation.num_qubits} qubits: expected at most {MOST_WIRES}; use several")
    return kraus(operation.params)


def _matrix_gate(operation: Any) -> Gate:
    from qiskit.exceptions import QiskitError
    from qiskit.quantum_info import Operator

    if operation.num_qubits <= MOST_MATRIX and not getattr(operation, "num_clbits", 0):
        try:
            return unitary(np.asarray(Operator(operation).data))
        except (QiskitError, TypeError, ValueError):
            pass
    raise UsageError(
        f"instruction {operation.name!r} on {operation.num_qubits} qubits has no definition: expected one, a matrix "
        f"on at most {MOST_MATRIX} qubits, or Kraus operators; transpile the circuit first"
    )
