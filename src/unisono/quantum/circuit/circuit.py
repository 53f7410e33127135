"""A circuit: wires, and the operations on them in order.

    circuit = Circuit(3).h(0).cnot(0, 1).rz(2, weight(0))
    circuit.compose(other, wires=(2, 0)).inverse()

Every method that adds something returns the circuit, so calls chain. The gates' methods are in gate_methods.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.quantum.arguments import shown
from unisono.quantum.circuit.channels import ChannelMethods, StrengthChannel
from unisono.quantum.circuit.gate_methods import GateMethods
from unisono.quantum.circuit.gates import ALIASES, BARRIER, CONTROLLED, MEASURE, Gate, gate
from unisono.quantum.circuit.growable import ChunkedList
from unisono.quantum.circuit.operation import Controls, Operation
from unisono.quantum.circuit.operations import Operations
from unisono.quantum.circuit.parameter import Angle, affine, finite_vector, in_order, is_index

if TYPE_CHECKING:
    from typing import Self


MOST = 1 << 20  # wires, and classical bits


class Circuit(GateMethods, ChannelMethods):
    """Gates and measurements on qubits that start in |0...0>.

    Args:
        wires: How many qubits.
        bits: How many classical bits, which measurements write.
    """

    def __init__(self, wires: int, bits: int = 0) -> None:
        if not is_index(wires) or not 1 <= wires <= MOST:
            raise UsageError(f"Circuit({wires!r}): expected a number of wires of 1 to {MOST}")
        if not is_index(bits) or not 0 <= bits <= MOST:
            raise UsageError(f"Circuit({wires}, bits={bits!r}): expected a number of classical bits of 0 to {MOST}")
        self.wires = int(wires)
        self.bits = int(bits)
        self._operations: ChunkedList[Operation] | Operations = Operations()  # chunks while the circuit grows

    @property
    def operations(self) -> Operations:
        if isinstance(self._operations, ChunkedList):
            self._operations = Operations(self._operations)
        return self._operations

    @property
    def weights(self) -> int:
        """How many trainable weights the circuit reads: the highest index and one."""
        return 1 + max((index for each in self._operations for index, _ in each.terms()[0]), default=-1)

    @property
    def features(self) -> int:
        """How many inputs the circuit reads: the highest index and one."""
        return 1 + max((index for each in self._operations for index, _ in each.terms()[1]), default=-1)

    @property
    def is_unitary(self) -> bool:
        """No measurement, no reset, no channel, nothing that depends on a bit."""
        return all(each.is_unitary or each.name == "barrier" for each in self._operations)

    def append(self, operation: Operation) -> Self:
        """Add an operation after checking it against the circuit and its gate."""
        self._add([self._checked(operation, self.bits)])
        return self

    def _add(self, operations: list[Operation]) -> None:
        if isinstance(self._operations, Operations):
            self._operations = ChunkedList(self._operations)
        self._operations.extend(operations)

    def _checked(self, operation: Operation, bits: int) -> Operation:
        """The operation, if it is one for a circuit with these wires and so many bits."""
        if not isinstance(operation, Operation):
            raise UsageError(f"append of a {type(operation).__name__}: expected an Operation; apply makes them")
        operation.check_form()
        kind = operation.gate
        if len(operation.targets) != kind.targets and kind is not BARRIER:
            raise UsageError(f"{kind.name} acts on {kind.targets} wires, but got {_listed(operation.targets)}")
        if len(operation.parameters) != kind.parameters:
            raise UsageError(f"{kind.name} takes {kind.parameters} angles, but got {len(operation.parameters)}")
        if len(operation.bits) != (kind is MEASURE):
            raise UsageError(f"{kind.name} writes {len(operation.bits)} bits: use circuit.measure(wire, bit)")
        if operation.controls and not kind.unitary:
            raise UsageError(f"{operation} cannot be controlled: it is no unitary gate")
        for wire in operation.wires:
            if not is_index(wire) or not 0 <= wire < self.wires:
                raise UsageError(f"{kind.name} on wire {wire!r}: the circuit has wires 0 to {self.wires - 1}")
        for bit in (*operation.bits, *(bit for bit, _ in operation.condition)):
            if not is_index(bit) or bit < 0:
                raise UsageError(f"{kind.name} uses bit {bit!r}: expected an index of 0 or more")
            if bit >= bits:
                raise UsageError(f"{kind.name} uses bit {bit}, but the circuit has {bits}; make it with bits={bit + 1}")
        for where, value in (*operation.controls, *operation.condition):
            if not (is_index(value) or isinstance(value, bool)) or value not in (0, 1):
                raise UsageError(f"{kind.name} is controlled on value {value!r} of {where}: expected 0 or 1")
        operation = _plain(operation)
        if len(set(operation.wires)) != len(operation.wires):
            raise UsageError(f"{kind.name} names a wire twice: {_listed(operation.wires)}")
        return operation

    def apply(
        self,
        kind: str | Gate,
        targets: int | Sequence[int] = (),
        *angles: Angle,
        controls: Mapping[int, int] | Sequence[int] = (),
        condition: Mapping[int, int] | None = None,
    ) -> Self:
        """Any gate, by name or as a Gate, under any controls: a sequence of wires, or {wire: 0 or 1}.

        Named controlled gates ("cx", "ccx", "crz", ...) take their controls as first targets."""
        wires = _wires(targets)
        pairs = _pairs(controls)
        if not isinstance(kind, str | Gate):
            raise UsageError(f"apply of a {type(kind).__name__}: expected a gate's name, such as 'ry', or a Gate")
        kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
        if isinstance(kind, str) and kind in CONTROLLED:
            kind, count = CONTROLLED[kind]
            pairs += tuple((wire, 1) for wire in wires[:count])
            wires = wires[count:]
        kind = gate(kind) if isinstance(kind, str) else kind
        parameters = tuple(affine(angle) for angle in angles)
        return self.append(
            Operation(kind, wires, pairs, parameters, condition=_pairs({} if condition is None else condition))
        )

    def compose(
        self,
        other: Circuit,
        wires: Sequence[int] | None = None,
        controls: Mapping[int, int] | Sequence[int] = (),
    ) -> Self:
        """Add all operations of `other`, its wire i as wires[i] (default: the same wires), under further controls.

        Weights and features keep their indices; see `shifted` for another circuit's own weights."""
        if not isinstance(other, Circuit):
            raise UsageError(f"compose of a {type(other).__name__}: expected a Circuit")
        mapping = tuple(range(other.wires)) if wires is None else _wires(wires)
        if len(mapping) != other.wires:
            raise UsageError(f"compose: {other.wires} wires to map, but wires={_listed(mapping)}")
        inside = all(is_index(wire) and 0 <= wire < self.wires for wire in mapping)
        if not inside or len({*map(int, mapping)}) != len(mapping):
            raise UsageError(f"compose: wires={_listed(mapping)}: expected different wires of 0 to {self.wires - 1}")
        pairs = _pairs(controls)
        bits = max(self.bits, other.bits)
        mapped = [operation.on(mapping) for operation in other.operations]
        self._add([self._checked(each.controlled(pairs) if pairs else each, bits) for each in mapped])
        self.bits = bits
        return self

    def inverse(self) -> Circuit:
        """A new circuit that undoes this one."""
        undone = type(self)(self.wires, self.bits)
        for operation in reversed(self.operations):
            undone.append(operation.inverse())
        return undone

    def copy(self) -> Circuit:
        twin = type(self)(self.wires, self.bits)
        twin._operations = self.operations
        return twin

    def __add__(self, other: Circuit) -> Circuit:
        """A new circuit: this one, then `other`."""
        if not isinstance(other, Circuit):
            raise UsageError(f"a circuit + {shown(other)}: expected another Circuit")
        if other.wires > self.wires:
            raise UsageError(
                f"cannot add a circuit of {other.wires} wires to one of {self.wires}; use compose(wires=...)"
            )
        return self.copy().compose(other, range(other.wires))

    def __radd__(self, other: object) -> Circuit:
        raise UsageError(f"{shown(other)} + a circuit: expected another Circuit; several are added with compose or +")

    def __mul__(self, other: object) -> Circuit:
        raise UsageError(
            f"a circuit * {shown(other)}: circuits are joined with + or compose; to repeat one, compose it in a loop"
        )

    __rmul__ = __mul__

    def bound(self, weights: Sequence[float] = (), features: Sequence[float] = ()) -> Circuit:
        """A new circuit with numbers instead of weights and features."""
        given = self.check_values(weights, features)
        bound = type(self)(self.wires, self.bits)
        for each in self._operations:
            parameters = tuple(affine(angle) for angle in each.angles(*given))
            bound.append(replace(each, parameters=parameters))
        return bound

    def shifted(self, weights: int = 0, features: int = 0) -> Circuit:
        """A new circuit that reads weight i + `weights` where this one reads weight i, and features likewise."""
        for kind, by in (("weights", weights), ("features", features)):
            if not is_index(by):
                raise UsageError(f"shifted({kind}={by!r}): expected a whole number")
        shifted = type(self)(self.wires, self.bits)
        for each in self._operations:
            parameters = tuple(parameter.shifted(weights, features) for parameter in each.parameters)
            shifted.append(replace(each, parameters=parameters))
        return shifted

    def with_strengths(self, weights: Any = (), features: Any = ()) -> Circuit:
        """The circuit with numbers for the strengths of its channels."""
        if not any(isinstance(each.gate, StrengthChannel) for each in self._operations):
            return self
        made = Circuit(self.wires, self.bits)
        for each in self._operations:
            if isinstance(each.gate, StrengthChannel):
                each = replace(each, gate=each.gate.at(*each.angles(weights, features)), parameters=())
            made.append(each)
        return made

    def check_values(self, weights: Any = (), features: Any = ()) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Both as arrays; refuses vectors that are not as long as the circuit needs, and what is no finite number."""
        kinds = (("weights", weights, self.weights), ("features", features, self.features))
        first, second = (finite_vector(*each) for each in kinds)
        return first, second

    def depth(self) -> int:
        """Layers of operations, when each goes as early as its wires allow."""
        level = [0] * self.wires
        for each in self._operations:
            wires = each.wires or range(self.wires)
            if each.name == "gphase" and not each.controls:
                continue
            top = max(level[wire] for wire in wires) + (each.name != "barrier")
            for wire in wires:
                level[wire] = top
        return max(level)

    def counts(self) -> dict[str, int]:
        """How often each gate occurs, "c" in front for each control: {"ry": 8, "cx": 4}."""
        return dict(Counter("c" * len(each.controls) + each.name for each in self._operations))

    def draw(self, kind: str = "text", width: int | None = None) -> Any:
        """The drawing as text, as SVG or ("mpl") as a figure of matplotlib, wrapped to `width` characters or pixels."""
        from unisono.quantum.circuit.drawing import svg, text
        from unisono.quantum.circuit.drawing_mpl import figure

        if not isinstance(kind, str) or kind not in ("text", "svg", "mpl"):
            raise UsageError(f'draw({kind!r}): expected "text", "svg" or "mpl"')
        if width is not None and (not is_index(width) or width < 1):
            raise UsageError(f"draw(width={width!r}): expected a number of characters or pixels, 1 or more")
        if kind == "mpl":
            return figure(self, width or 1200)
        return text(self, width or 120) if kind == "text" else svg(self, width or 1200)

    def to_qasm(self, version: int = 3) -> str:
        """The circuit as OpenQASM 2 or 3."""
        from unisono.quantum.qasm.writer import dumps

        return dumps(self, version)

    def __len__(self) -> int:
        return len(self._operations)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Circuit):
            return NotImplemented
        return (self.wires, self.bits, self.operations) == (other.wires, other.bits, other.operations)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Circuit({self.wires} wires, {len(self)} operations, {self.weights} weights, {self.features} features)"


def require_circuit(circuit: Any, what: str) -> Circuit:
    if not isinstance(circuit, Circuit):
        raise UsageError(f"{what} of {shown(circuit)}: expected a uq.Circuit")
    return circuit


def _wires(targets: int | Sequence[int]) -> tuple[int, ...]:
    if is_index(targets):
        return (int(targets),)  # type: ignore[arg-type]
    try:
        return in_order(targets)
    except TypeError:
        raise UsageError(f"wire {targets!r}: expected a number of 0 or more, or several of them") from None


def _plain(operation: Operation) -> Operation:
    """The same with Python's own integers: those of numpy and torch hash, or print, otherwise."""
    pairs = (*operation.controls, *operation.condition)
    numbers = (*operation.targets, *operation.bits, *(number for pair in pairs for number in pair))
    if all(type(number) is int for number in numbers):
        return operation
    return replace(
        operation,
        targets=tuple(map(int, operation.targets)),
        controls=tuple((int(wire), int(value)) for wire, value in operation.controls),
        bits=tuple(map(int, operation.bits)),
        condition=tuple((int(bit), int(value)) for bit, value in operation.condition),
    )


def _pairs(controls: Mapping[int, int] | Sequence[int]) -> Controls:
    if isinstance(controls, Mapping):
        return tuple((wire, value) for wire, value in controls.items())
    try:
        return tuple((wire, 1) for wire in in_order(controls))
    except TypeError:
        raise UsageError(f"controls {controls!r}: expected wires, or a mapping from wires to 0 or 1") from None


def _listed(wires: tuple[int, ...]) -> str:
    return f"{len(wires)} ({', '.join(map(str, wires))})" if wires else "none"
