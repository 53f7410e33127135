"""What names mean at one point of a text: registers, bits, values, gates."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field
from typing import Any

from unisono.quantum.circuit.operation import Controls, Operation
from unisono.quantum.qasm.catalogue import Known
from unisono.quantum.qasm.expression import Value, evaluate, integer
from unisono.quantum.qasm.token import Cursor, Token


@dataclass(frozen=True)
class Definition:
    """A gate that the text defines: its body is read again at each call, with the gates that were known before it."""

    name: str
    parameters: tuple[str, ...]
    operands: tuple[str, ...]
    body: Cursor
    version: int
    gates: dict[str, Known | Definition]


@dataclass(frozen=True)
class Operand:
    """Wires or bits that a text names; `single` when it names one element and not a register."""

    indices: tuple[int, ...]
    single: bool
    token: Token


@dataclass
class Scope:
    version: int = 2
    gates: dict[str, Known | Definition] = field(default_factory=dict)
    qubits: dict[str, Operand] = field(default_factory=dict)
    bits: dict[str, Operand] = field(default_factory=dict)
    values: ChainMap[str, Any] = field(default_factory=ChainMap)  # numbers, arrays and functions; outer scopes' follow
    out: list[Operation] = field(default_factory=list)
    condition: Controls = ()
    since: int = 0  # the operations before the outermost condition
    inside_gate: bool = False
    fixed: int = 0  # scopes, from the outermost on, whose values may not change: a condition on bits is between
    read_only: frozenset[str] = frozenset()  # bits that are parameters

    def inner(self, **changes: object) -> Scope:
        """A scope in which new names are forgotten at its end; operations go on to the same list."""
        fresh: dict[str, object] = {"qubits": dict(self.qubits), "bits": dict(self.bits)}
        if "condition" in changes:
            fresh["fixed"] = len(self.values.maps)
            fresh["since"] = self.since if self.condition else len(self.out)
        return Scope(**(vars(self) | {"values": self.values.new_child()} | fresh | changes))

    def gates_in(self, body: Cursor, end: int) -> dict[str, Known | Definition]:
        """The gates that are known here, of those that a body may call; "h" tells whether a library is included."""
        names = {token.text for token in body.tokens[body.position : end]} | {"h"}
        return {name: self.gates[name] for name in names if name in self.gates}

    def knows(self, name: str) -> bool:
        return name in self.qubits or name in self.bits or name in self.values or name in self.gates

    def number(self, at: Cursor) -> Value:
        return evaluate(at, self.values, self.version)

    def integer(self, at: Cursor) -> int:
        return integer(at, self.values, self.version)

    def operand(self, at: Cursor, kind: str = "qubit") -> Operand:
        """A register, an element `q[2]` or a slice `q[0:2]` at the cursor."""
        token = at.kind("name", f"a {kind}")
        table = self.qubits if kind == "qubit" else self.bits
        if token.text not in table:
            other = self.bits if kind == "qubit" else self.qubits
            known = f"is no {kind}" if token.text in other or token.text in self.values else "is not defined"
            at.fail(f"{token.text!r} {known}; expected a {kind} or a register of them", token)
        found = table[token.text]
        if not at.sees("["):
            return Operand(found.indices, found.single, token)
        if found.single:
            at.fail(f"{token.text!r} is a single {kind} and has no elements")
        return self._indexed(at, found, token)

    def _indexed(self, at: Cursor, register: Operand, token: Token) -> Operand:
        at.expect("[")
        size = len(register.indices)
        first = at.token
        numbers = [self._index(at, size)]
        while at.skip(":"):
            numbers.append(self._index(at, size))
        at.expect("]")
        if len(numbers) == 1:
            return Operand((register.indices[numbers[0]],), True, token)
        if self.version < 3 or len(numbers) > 3:
            at.fail("expected one index", first)
        start, *middle, stop = numbers
        at.spend(len(between(start, stop, *middle)))
        return Operand(tuple(register.indices[i] for i in between(start, stop, *middle)), False, token)

    def _index(self, at: Cursor, size: int) -> int:
        token = at.token
        index = self.integer(at)
        position = index + size if index < 0 and self.version > 2 else index
        if not 0 <= position < size:
            at.fail(f"index {index} is out of range; the register has {size}, numbered 0 to {size - 1}", token)
        return position


def between(start: int, stop: int, step: int = 1) -> range:
    """OpenQASM's range: both ends included."""
    return range(start, stop + (1 if step > 0 else -1), step or 1)
