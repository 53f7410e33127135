"""Reads OpenQASM 2, and of 3: qubits, bits, gates with modifiers, measure, reset, if, for, const, input.

    circuit = load_qasm("circuit.qasm")
    circuit = from_qasm('OPENQASM 2.0; include "qelib1.inc"; qreg q[1]; h q[0];')

Qubits become wires in the order of their declaration, bits likewise. `input float theta;` becomes the next weight, and
`input float weight_3` or `feature_2` the weight or feature of that number, as the writer names them.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import GATES
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Affine, feature, weight
from unisono.quantum.qasm.call import call
from unisono.quantum.qasm.catalogue import BUILT_IN, DEFINED, FILES
from unisono.quantum.qasm.native import native
from unisono.quantum.qasm.scope import Definition, Operand, Scope, between
from unisono.quantum.qasm.token import Cursor, Token, tokenize

_KEYWORDS = {2: {"include", "qreg", "creg", "gate", "opaque", "measure", "reset", "barrier", "if"}}
_KEYWORDS[3] = _KEYWORDS[2] | {"qubit", "bit", "let", "for"}
_NUMBERS = {"int", "uint", "float", "angle", "bool", "const", "input", "output"}
_FOREIGN = {"while", "switch", "def", "defcal", "cal", "extern", "box", "delay", "stretch", "duration", "return"}
_FOREIGN |= {"break", "continue", "array", "end", "complex", "defcalgrammar"}
_LARGEST_REGISTER = 4096
_LONGEST_LOOP = 1 << 20


def load_qasm(path: str | Path) -> Circuit:
    """The circuit of a file; `include` looks beside it."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"load_qasm of a {type(path).__name__}: expected the path of an OpenQASM file")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    return QasmParser(text, str(path), path.parent).circuit()


def from_qasm(text: str, source: str = "qasm") -> Circuit:
    """The circuit of a text; `source` names it in errors."""
    if not isinstance(text, str):
        raise UsageError(f"from_qasm of a {type(text).__name__}: expected a text; uq.load_qasm reads files")
    return QasmParser(text, source, None).circuit()


class QasmParser:
    def __init__(self, text: str, source: str, folder: Path | None) -> None:
        self.at = Cursor(tokenize(text, source), source)
        self.folder = folder
        self.scope = Scope()
        self.wires = 0
        self.bits = 0
        self.inputs: dict[str, Affine] = {}
        self.including: list[str] = [source]
        self.defined: set[str] = set()  # gates of the text, without those of the standard files

    def circuit(self) -> Circuit:
        self._version()
        try:
            self._run(self.scope)
        except RecursionError:
            self.at.fail("this is nested too deeply to be read")
        if not self.wires:
            self.at.fail("the program declares no qubits")
        circuit = Circuit(self.wires, self.bits)
        for operation in self.scope.out:
            circuit.append(operation)
        return circuit

    def _version(self) -> None:
        if self.at.skip("OPENQASM"):
            token = self.at.next()
            if token.kind not in ("integer", "real") or int(float(token.text)) not in (2, 3):
                self.at.fail(f"version {token.text} is not read; expected 2.0 or 3.0", token)
            self.scope.version = int(float(token.text))
            self.at.expect(";")
        self.scope.gates |= BUILT_IN[self.scope.version]

    def _run(self, scope: Scope, end: int | None = None) -> None:
        while self.at.position < (len(self.at.tokens) - 1 if end is None else end):
            self._statement(scope)

    def _statement(self, scope: Scope) -> None:
        token = self.at.kind("name", "a statement")
        if token.text in _KEYWORDS[scope.version]:
            if scope.inside_gate and token.text not in ("barrier", "for"):
                self.at.fail(f"{token.text!r} cannot stand inside a gate definition", token)
            getattr(self, f"_read_{token.text}")(scope)
        elif scope.version > 2 and token.text in _FOREIGN:
            self.at.fail(f"{token.text!r} is not in the part of OpenQASM that is read", token)
        elif scope.version > 2 and token.text in _NUMBERS:
            self._numbers(scope, token.text)
        else:
            self.at.position -= 1
            if token.text in scope.bits and not scope.inside_gate:
                self._assignment(scope)
            else:
                operations = call(self, scope)
                self.at.expect(";")
                self._emit(scope, operations)

    def _emit(self, scope: Scope, operations: list[Operation]) -> None:
        if scope.condition:
            operations = [replace(each, condition=(*scope.condition, *each.condition)) for each in operations]
        scope.out.extend(operations)

    def _block(self, scope: Scope) -> None:
        """A block in braces, or one statement, in a scope of its own."""
        inner = scope.inner()
        if self.at.sees("{"):
            end = self.at.block_end()
            self.at.next()
            self._run(inner, end)
            self.at.expect("}")
        else:
            self._statement(inner)

    def _skip_block(self) -> None:
        if self.at.sees("{"):
            self.at.position = self.at.block_end() + 1
            return
        while not self.at.sees(";"):
            if self.at.token.kind == "end":
                self.at.expect(";")
            self.at.next()
        self.at.next()

    # Declarations ---------------------------------------------------------------------------------------------------

    def _read_include(self, scope: Scope) -> None:
        token = self.at.kind("string", "a file name in quotes")
        self.at.expect(";")
        name = token.text.strip('"')
        if name in FILES:
            scope.gates.update(FILES[name])
            if name in DEFINED:
                kept, self.defined = self.defined, set()  # a text may define these again
                self._run_text(scope, DEFINED[name], name)
                self.defined = kept
            return
        path = None if self.folder is None else self.folder / name
        if path is None or not path.is_file():
            self.at.fail(f"include {name!r}: no such file; {' and '.join(FILES)} are built in", token)
        if str(path) in self.including:
            self.at.fail(f"include {name!r} includes itself", token)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self.at.fail(f"include {name!r}: cannot read it: {error}", token)
        self.including.append(str(path))
        self._run_text(scope, text, str(path))
        self.including.pop()

    def _run_text(self, scope: Scope, text: str, source: str) -> None:
        outer, self.at = self.at, Cursor(tokenize(text, source), source)
        if self.at.skip("OPENQASM"):
            self.at.next()
            self.at.expect(";")
        self._run(scope)
        self.at = outer

    def _read_qreg(self, scope: Scope) -> None:
        self._register(scope, "qubit", self._new_name(scope), self._size(scope))

    def _read_creg(self, scope: Scope) -> None:
        self._register(scope, "bit", self._new_name(scope), self._size(scope))

    def _read_qubit(self, scope: Scope) -> None:
        size = self._size(scope) if self.at.sees("[") else None
        self._register(scope, "qubit", self._new_name(scope), size)

    def _read_bit(self, scope: Scope) -> None:
        size = self._size(scope) if self.at.sees("[") else None
        name = self._new_name(scope)
        if self.at.skip("="):
            self._declare(scope, "bit", name, size)
            self.at.expect("measure")
            self._measure_into(scope, scope.bits[name.text])
        else:
            self._register(scope, "bit", name, size)

    def _size(self, scope: Scope) -> int:
        self.at.expect("[")
        token = self.at.token
        size = scope.integer(self.at)
        if not 1 <= size <= _LARGEST_REGISTER:
            self.at.fail(f"a register of {size}: expected 1 to {_LARGEST_REGISTER}", token)
        self.at.expect("]")
        return size

    def _new_name(self, scope: Scope) -> Token:
        token = self.at.kind("name", "a name")
        if token.text in scope.qubits or token.text in scope.bits or token.text in scope.values:
            self.at.fail(f"{token.text!r} is already declared", token)
        return token

    def _register(self, scope: Scope, kind: str, name: Token, size: int | None) -> None:
        self._declare(scope, kind, name, size)
        self.at.expect(";")

    def _declare(self, scope: Scope, kind: str, name: Token, size: int | None) -> None:
        start = self.wires if kind == "qubit" else self.bits
        operand = Operand(tuple(range(start, start + (size or 1))), size is None, name)
        if kind == "qubit":
            self.wires += size or 1
            scope.qubits[name.text] = operand
        else:
            self.bits += size or 1
            scope.bits[name.text] = operand

    def _read_opaque(self, scope: Scope) -> None:
        self._skip_block()  # it has no body: a call of it is the error

    def _read_let(self, scope: Scope) -> None:
        name = self._new_name(scope)
        self.at.expect("=")
        parts = [scope.operand(self.at)]
        while self.at.skip("++"):
            parts.append(scope.operand(self.at))
        self.at.expect(";")
        indices = tuple(index for part in parts for index in part.indices)
        scope.qubits[name.text] = Operand(indices, len(parts) == 1 and parts[0].single, name)

    def _numbers(self, scope: Scope, first: str) -> None:
        if first in ("const", "input", "output") and self.at.sees(*_NUMBERS):
            self.at.next()
        if self.at.skip("["):
            scope.integer(self.at)
            self.at.expect("]")
        name = self._new_name(scope)
        if first == "input":
            scope.values[name.text] = self._input(name.text)
        elif first == "output":
            self.at.fail("'output' is not in the part of OpenQASM that is read")
        else:
            self.at.expect("=")
            scope.values[name.text] = scope.number(self.at)
        self.at.expect(";")

    def _input(self, name: str) -> Affine:
        match = re.fullmatch(r"(weight|feature)_(\d+)", name)
        if match:
            made = (weight if match[1] == "weight" else feature)(int(match[2]))
        else:
            made = weight(1 + max((each.weights[0][0] for each in self.inputs.values() if each.weights), default=-1))
        self.inputs[name] = made
        return made

    def _read_gate(self, scope: Scope) -> None:
        name = self.at.kind("name", "a gate's name")
        parameters: list[str] = []
        if self.at.skip("("):
            parameters = [] if self.at.sees(")") else self._names()
            self.at.expect(")")
        operands = self._names()
        if len({*parameters, *operands}) != len(parameters) + len(operands):
            self.at.fail(f"gate {name.text!r} uses a name twice", name)
        if not self.at.sees("{"):
            self.at.expect("{")
        end = self.at.block_end()
        body = self.at.at(self.at.position + 1)
        if name.text in self.defined:
            self.at.fail(f"gate {name.text!r} is already defined", name)
        self.defined.add(name.text)
        definition = Definition(name.text, tuple(parameters), tuple(operands), body, scope.version, dict(scope.gates))
        scope.gates[name.text] = native(definition, lambda *given: self.expand(definition, *given))
        self.at.position = end + 1

    def _names(self) -> list[str]:
        names = [self.at.kind("name", "a name").text]
        while self.at.skip(","):
            names.append(self.at.kind("name", "a name").text)
        return names

    def expand(self, definition: Definition, angles: list[Affine], wires: list[int]) -> list[Operation]:
        """The operations of a defined gate on these wires."""
        pairs = zip(definition.operands, wires, strict=True)
        qubits = {name: Operand((wire,), True, self.at.token) for name, wire in pairs}
        values = {**self.scope.values, **dict(zip(definition.parameters, angles, strict=True))}
        inner = Scope(definition.version, definition.gates, qubits, {}, values, [], inside_gate=True)
        outer, self.at = self.at, definition.body.at(definition.body.position)
        while not self.at.sees("}"):
            self._statement(inner)
        self.at = outer
        return inner.out

    # What happens to qubits -----------------------------------------------------------------------------------------

    def _read_measure(self, scope: Scope) -> None:
        wires = scope.operand(self.at)
        if scope.version == 2 or self.at.sees("->"):
            self.at.expect("->")
            bits = scope.operand(self.at, "bit")
        else:  # OpenQASM 3 may forget the outcome: it goes to bits that have no name
            bits = Operand(tuple(range(self.bits, self.bits + len(wires.indices))), False, wires.token)
            self.bits += len(wires.indices)
        self._measured(scope, wires, bits)

    def _assignment(self, scope: Scope) -> None:
        bits = scope.operand(self.at, "bit")
        self.at.expect("=")
        if not self.at.skip("measure"):
            self.at.fail("a bit can only be assigned a measurement")
        self._measure_into(scope, bits)

    def _measure_into(self, scope: Scope, bits: Operand) -> None:
        self._measured(scope, scope.operand(self.at), bits)

    def _measured(self, scope: Scope, wires: Operand, bits: Operand) -> None:
        if len(wires.indices) != len(bits.indices):
            self.at.fail(f"{len(wires.indices)} qubits are measured into {len(bits.indices)} bits", wires.token)
        self.at.expect(";")
        pairs = zip(wires.indices, bits.indices, strict=True)
        self._emit(scope, [Operation(GATES["measure"], (wire,), bits=(bit,)) for wire, bit in pairs])

    def _read_reset(self, scope: Scope) -> None:
        wires = scope.operand(self.at)
        self.at.expect(";")
        self._emit(scope, [Operation(GATES["reset"], (wire,)) for wire in wires.indices])

    def _read_barrier(self, scope: Scope) -> None:
        wires: dict[int, None] = {}
        if self.at.sees(";"):
            wires = dict.fromkeys(range(self.wires))
        while not self.at.sees(";"):
            wires |= dict.fromkeys(scope.operand(self.at).indices)
            if not self.at.skip(","):
                break
        self.at.expect(";")
        if not scope.inside_gate:
            scope.out.append(Operation(GATES["barrier"], tuple(wires)))

    # Flow -----------------------------------------------------------------------------------------------------------

    def _read_if(self, scope: Scope) -> None:
        start = self.at.token
        self.at.expect("(")
        condition = self._condition(scope)
        while self.at.skip("&&"):
            condition += self._condition(scope)
        self.at.expect(")")
        first = len(scope.out)
        if any((bit, 1 - value) in (*condition, *scope.condition) for bit, value in condition):
            self._skip_block()
        else:
            self._block(scope.inner(condition=(*scope.condition, *dict.fromkeys(condition))))
        made = scope.out[first:]  # each asks for the bits again, so that only the last may write them
        if any(
            {bit for bit, _ in condition} & set(each.bits) for each in (made if self.at.sees("else") else made[:-1])
        ):
            self.at.fail("a bit that is asked for is written under its own condition, and more follows", start)
        if self.at.skip("else"):
            if len(condition) != 1:
                self.at.fail("'else' is read after a condition on one bit only", start)
            ((bit, value),) = condition
            self._block(scope.inner(condition=(*scope.condition, (bit, 1 - value))))

    def _condition(self, scope: Scope) -> tuple[tuple[int, int], ...]:
        negated = self.at.skip("!")
        bits = scope.operand(self.at, "bit")
        value = 1
        if self.at.sees("==", "!="):
            negated ^= self.at.next().text == "!="
            token = self.at.token
            value = scope.integer(self.at)
            if not 0 <= value < 2 ** len(bits.indices):
                self.at.fail(f"{len(bits.indices)} bits are never {value}", token)
        elif not bits.single:
            self.at.fail("a register is compared with ==", bits.token)
        if negated and len(bits.indices) > 1:
            self.at.fail("'not equal' is read for one bit only", bits.token)
        return tuple((bit, (value >> index & 1) ^ negated) for index, bit in enumerate(bits.indices))

    def _read_for(self, scope: Scope) -> None:
        if self.at.sees("int", "uint"):
            self.at.next()
            if self.at.skip("["):
                scope.integer(self.at)
                self.at.expect("]")
        name = self.at.kind("name", "the loop's variable")
        self.at.expect("in")
        numbers = self._loop_values(scope)
        start = self.at.position
        for number in numbers:
            self.at.position = start
            self._block(scope.inner(values={**scope.values, name.text: number}))
        if not numbers:
            self._skip_block()

    def _loop_values(self, scope: Scope) -> list[int]:
        closing = {"[": "]", "{": "}"}.get(self.at.token.text)
        if closing is None:
            self.at.fail(f"expected [first:last] or {{a, b, c}}, but found {self.at.shown()}")
        separator = ":" if self.at.next().text == "[" else ","
        numbers = [scope.integer(self.at)]
        while self.at.skip(separator):
            numbers.append(scope.integer(self.at))
        token = self.at.expect(closing)
        if separator == ",":
            return numbers
        if len(numbers) not in (2, 3) or (len(numbers) == 3 and numbers[1] == 0):
            self.at.fail("expected [first:last] or [first:step:last] with a step that is not 0", token)
        first, *step, last = numbers
        values = between(first, last, *step)
        if len(values) > _LONGEST_LOOP:
            self.at.fail(f"a loop of {len(values)} iterations: at most {_LONGEST_LOOP} are read", token)
        return [*values]
