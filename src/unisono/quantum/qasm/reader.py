"""Reads OpenQASM 2, and of 3: qubits, bits, gates with modifiers, measure, reset, input, and what is computed while it
is read: numbers, arrays, if, for, while and subroutines.

    circuit = load_qasm("circuit.qasm")
    circuit = from_qasm('OPENQASM 2.0; include "qelib1.inc"; qreg q[1]; h q[0];')

Qubits become wires in the order of their declaration, bits likewise. `input float theta;` becomes the next weight, and
`input float weight_3` or `feature_2` the weight or feature of that number, as the writer names them.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path

from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import GATES
from unisono.quantum.circuit.operation import Controls, Operation
from unisono.quantum.circuit.parameter import Affine, feature, weight
from unisono.quantum.qasm.call import call
from unisono.quantum.qasm.catalogue import BUILT_IN, DEFINED, FILES
from unisono.quantum.qasm.expression import array, assign
from unisono.quantum.qasm.flow import STATEMENTS
from unisono.quantum.qasm.native import native
from unisono.quantum.qasm.scope import Definition, Operand, Scope
from unisono.quantum.qasm.subroutine import Subroutine, call_into, call_subroutine, read_def, read_return
from unisono.quantum.qasm.token import OPERATION, Cursor, Token, Work, tokenize
from unisono.regular_files import read_text

_KEYWORDS = {2: {"include", "qreg", "creg", "gate", "opaque", "measure", "reset", "barrier", "if"}}
_KEYWORDS[3] = _KEYWORDS[2] | {"qubit", "bit", "let", "for", "while", "break", "continue", "def", "return", "array"}
_NUMBERS = {"int", "uint", "float", "angle", "bool", "const", "input", "output"}
_FOREIGN = {"switch", "defcal", "cal", "extern", "box", "delay", "stretch", "duration"}
_FOREIGN |= {"end", "complex", "defcalgrammar"}
_LARGEST_REGISTER = 4096
_STEPS_A_CHARACTER = 4  # that a text may take beside `limit`
LIMIT = 1 << 22  # about a million operations out of a short text; what a text writes out itself is not limited


def load_qasm(path: str | Path, *, limit: int = LIMIT) -> Circuit:
    """The circuit of a file; `include` reads files of its folder only.

    limit: the steps that loops, gates and subroutines may be written out into; an operation takes five to ten.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"load_qasm of a {type(path).__name__}: expected the path of an OpenQASM file")
    path = Path(path)
    try:
        text = read_text(path, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    return QasmParser(text, str(path), path.parent, limit).circuit()


def from_qasm(text: str, source: str = "qasm", *, limit: int = LIMIT) -> Circuit:
    """The circuit of a text; `source` names it in errors. limit: see `load_qasm`."""
    if not isinstance(text, str):
        raise UsageError(f"from_qasm of a {type(text).__name__}: expected a text; uq.load_qasm reads files")
    return QasmParser(text, source, None, limit).circuit()


class QasmParser:
    def __init__(self, text: str, source: str, folder: Path | None, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise UsageError(f"limit={limit!r}: expected a whole number of at least 1")
        self.work = Work(limit)
        self.work.left += _STEPS_A_CHARACTER * len(text)
        self.at = Cursor(tokenize(text, source), source, self.work)
        self.folder = None if folder is None else folder.resolve()
        self.scope = Scope()
        self.wires = 0
        self.bits = 0
        self.including = [source if self.folder is None else str(self.folder / Path(source).name)]
        self.included: set[str] = set()
        self.defined: set[str] = set()  # gates of the text, without those of the standard files
        self.subroutines: dict[str, Subroutine] = {}
        self.calling: list[tuple[str, Controls]] = []  # subroutines in whose bodies the cursor is, with conditions
        self.loops: list[Controls] = []  # the conditions under which loops around the cursor run
        self.next_weight = 0

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
            if not re.fullmatch(r"[23](\.[0-9]{0,9})?", token.text):
                self.at.fail(f"version {token.text} is not read; expected 2.0 or 3.0", token)
            self.scope.version = int(token.text[0])
            self.at.expect(";")
        self.scope.gates |= BUILT_IN[self.scope.version]

    def _run(self, scope: Scope, end: int | None = None) -> None:
        while self.at.position < (len(self.at.tokens) - 1 if end is None else end):
            self.statement(scope)

    def statement(self, scope: Scope) -> None:
        self.at.spend(1)
        token = self.at.kind("name", "a statement")
        if token.text in _KEYWORDS[scope.version]:
            if scope.inside_gate and token.text not in ("barrier", "for"):
                self.at.fail(f"{token.text!r} cannot stand inside a gate definition", token)
            if token.text in STATEMENTS:
                STATEMENTS[token.text](self, scope, token)
            else:
                getattr(self, f"_read_{token.text}")(scope)
        elif scope.version > 2 and token.text in _FOREIGN:
            self.at.fail(f"{token.text!r} is not in the part of OpenQASM that is read", token)
        elif scope.version > 2 and token.text in _NUMBERS:
            self._numbers(scope, token.text)
        else:
            self.at.position -= 1
            if token.text in scope.bits and not scope.inside_gate:
                self._assignment(scope)
            elif token.text in scope.values and not scope.inside_gate and not callable(scope.values[token.text]):
                assign(self.at, scope)
            elif token.text in self.subroutines:
                call_subroutine(self, scope)
                self.at.expect(";")
            else:
                operations = call(self, scope)
                self.at.expect(";")
                self.emit(scope, operations)

    def emit(self, scope: Scope, operations: list[Operation]) -> None:
        if scope.condition:
            self.at.spend(len(operations) * len(scope.condition))
            operations = [replace(each, condition=(*scope.condition, *each.condition)) for each in operations]
        scope.out.extend(operations)

    def block(self, scope: Scope) -> None:
        """A block in braces, or one statement, in a scope of its own."""
        self.at.spend(2 + (len(scope.qubits) + len(scope.bits)) // 8)
        inner = scope.inner()
        if self.at.sees("{"):
            end = self.at.block_end()
            self.at.next()
            self._run(inner, end)
            self.at.expect("}")
        else:
            self.statement(inner)

    def skip_block(self) -> None:
        """Go behind a block in braces, or one statement."""
        if self.at.sees("{"):
            self.at.position = self.at.block_end() + 1
            return
        first = self.at.next()
        if first.kind == "name" and first.text in ("if", "while", "for"):
            while first.text == "for" and not self.at.skip("in"):
                self._skip_one()
            self._skip_one()
            self.skip_block()
            if first.text == "if" and self.at.skip("else"):
                self.skip_block()
            return
        while not self.at.skip(";"):
            if self.at.token.kind == "end":
                self.at.expect(";")
            self.at.next()

    def _skip_one(self) -> None:
        """Go behind one token, or what is in brackets that open here."""
        opening = self.at.next()
        depth = int(opening.text in ("(", "[", "{"))
        while depth:
            if self.at.token.kind == "end":
                self.at.fail("this bracket is never closed", opening)
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(self.at.next().text, 0)

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
        if scope is not self.scope:
            self.at.fail("an include stands outside of loops, conditions and subroutines", token)
        path = self._beside(name, token)
        if path in self.including:
            self.at.fail(f"include {name!r} includes itself", token)
        try:
            text = read_text(path, encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            self.at.fail(f"include {name!r}: cannot read it: {getattr(error, 'strerror', None) or error}", token)
        if path in self.included:
            self.at.spend(len(text) // 16)
        else:
            self.work.left += _STEPS_A_CHARACTER * len(text)
        self.included.add(path)
        self.including.append(path)
        self._run_text(scope, text, path)
        self.including.pop()

    def _beside(self, name: str, token: Token) -> str:
        """The file of that name in the folder of the text."""
        path = None
        if self.folder is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # too long, a NUL, a ring of links
                path = (self.folder / name).resolve(strict=True)
        if path is None or self.folder is None:
            self.at.fail(f"include {name!r}: no such file; {' and '.join(FILES)} are built in", token)
        if not path.is_relative_to(self.folder):
            self.at.fail(f"include {name!r} is outside of {self.folder}; only files in it are read", token)
        return str(path)

    def _run_text(self, scope: Scope, text: str, source: str) -> None:
        outer, self.at = self.at, Cursor(tokenize(text, source), source, self.work)
        if self.at.skip("OPENQASM"):
            self.at.next()
            self.at.expect(";")
        self._run(scope)
        self.at = outer

    def _read_qreg(self, scope: Scope) -> None:
        self._register(scope, "qubit", self.new_name(scope), self.size(scope))

    def _read_creg(self, scope: Scope) -> None:
        self._register(scope, "bit", self.new_name(scope), self.size(scope))

    def _read_qubit(self, scope: Scope) -> None:
        size = self.size(scope) if self.at.sees("[") else None
        self._register(scope, "qubit", self.new_name(scope), size)

    def _read_bit(self, scope: Scope) -> None:
        size = self.size(scope) if self.at.sees("[") else None
        name = self.new_name(scope)
        if self.at.skip("="):
            self.declare(scope, "bit", name, size)
            self._write_bits(scope, scope.bits[name.text])
        else:
            self._register(scope, "bit", name, size)

    def size(self, scope: Scope) -> int:
        self.at.expect("[")
        token = self.at.token
        size = scope.integer(self.at)
        if not 1 <= size <= _LARGEST_REGISTER:
            self.at.fail(f"a register of {size}: expected 1 to {_LARGEST_REGISTER}", token)
        self.at.expect("]")
        return size

    def new_name(self, scope: Scope) -> Token:
        token = self.at.kind("name", "a name")
        if token.text in scope.qubits or token.text in scope.bits or token.text in scope.values:
            self.at.fail(f"{token.text!r} is already declared", token)
        return token

    def _register(self, scope: Scope, kind: str, name: Token, size: int | None) -> None:
        self.declare(scope, kind, name, size)
        self.at.expect(";")

    def declare(self, scope: Scope, kind: str, name: Token, size: int | None) -> None:
        self.at.spend(size or 1)
        start = self.wires if kind == "qubit" else self.bits
        operand = Operand(tuple(range(start, start + (size or 1))), size is None, name)
        if kind == "qubit":
            self.wires += size or 1
            scope.qubits[name.text] = operand
        else:
            self.bits += size or 1
            scope.bits[name.text] = operand

    def _read_opaque(self, scope: Scope) -> None:
        self.skip_block()  # it has no body: a call of it is the error

    def _read_let(self, scope: Scope) -> None:
        name = self.new_name(scope)
        self.at.expect("=")
        parts = [scope.operand(self.at)]
        while self.at.skip("++"):
            parts.append(scope.operand(self.at))
        self.at.expect(";")
        self.at.spend(sum(len(part.indices) for part in parts))
        indices = tuple(index for part in parts for index in part.indices)
        scope.qubits[name.text] = Operand(indices, len(parts) == 1 and parts[0].single, name)

    def _numbers(self, scope: Scope, first: str) -> None:
        if first == "const" and self.at.skip("array"):
            self._read_array(scope)
            return
        if first in ("const", "input", "output") and self.at.sees(*_NUMBERS):
            self.at.next()
        if self.at.skip("["):
            scope.integer(self.at)
            self.at.expect("]")
        name = self.new_name(scope)
        if first == "input":
            if scope is not self.scope:
                self.at.fail("'input' stands outside of loops, conditions and subroutines", name)
            scope.values[name.text] = self._input(name)
        elif first == "output":
            self.at.fail("'output' is not in the part of OpenQASM that is read")
        else:
            if first == "const" or self.at.sees("="):
                self.at.expect("=")
                scope.values[name.text] = scope.number(self.at)
            else:
                scope.values[name.text] = 0
        self.at.expect(";")

    def _read_array(self, scope: Scope) -> None:
        """array[type, sizes] name = {...};"""
        self.at.expect("[")
        kind = self.at.kind("name", "the type of an array's elements")
        if kind.text not in _NUMBERS - {"const", "input", "output"}:
            self.at.fail(f"an array of {kind.text!r}: expected one of int, uint, float, angle, bool", kind)
        if self.at.skip("["):
            scope.integer(self.at)
            self.at.expect("]")
        sizes = []
        while self.at.skip(","):
            sizes.append(self._array_size(scope))
        self.at.expect("]")
        name = self.new_name(scope)
        scope.values[name.text] = array(self.at, scope, tuple(sizes))
        self.at.expect(";")

    def _array_size(self, scope: Scope) -> int:
        token = self.at.token
        size = scope.integer(self.at)
        if not 1 <= size <= _LARGEST_REGISTER:
            self.at.fail(f"an array of {size}: expected 1 to {_LARGEST_REGISTER}", token)
        return size

    def _read_def(self, scope: Scope) -> None:
        read_def(self, scope)

    def _read_return(self, scope: Scope) -> None:
        read_return(self, scope)

    def _input(self, name: Token) -> Affine:
        match = re.fullmatch(r"(weight|feature)_(\d+)", name.text)
        try:
            if match and match[1] == "feature":
                return feature(int(match[2]))
            index = int(match[2]) if match else self.next_weight
            made = weight(index)
        except ValueError as error:
            self.at.fail(f"input {name.text!r}: {error}", name)
        self.next_weight = max(self.next_weight, index + 1)
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
        gates = scope.gates_in(body, end)
        definition = Definition(name.text, tuple(parameters), tuple(operands), body, scope.version, gates)
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
        values = self.scope.values.new_child(dict(zip(definition.parameters, angles, strict=True)))
        inner = Scope(definition.version, definition.gates, qubits, {}, values, [], inside_gate=True)
        outer, self.at = self.at, definition.body.at(definition.body.position)
        while not self.at.sees("}"):
            self.statement(inner)
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
        self._write_bits(scope, bits)

    def _write_bits(self, scope: Scope, bits: Operand) -> None:
        if self.at.token.text in self.subroutines:
            call_into(self, scope, bits)
            self.at.expect(";")
            return
        if not self.at.skip("measure"):
            self.at.fail("a bit can only be assigned a measurement, or what a subroutine measures")
        self._measured(scope, scope.operand(self.at), bits)

    def _measured(self, scope: Scope, wires: Operand, bits: Operand) -> None:
        if bits.token.text in scope.read_only:
            self.at.fail(f"{bits.token.text!r} is a parameter of a subroutine; it is read only", bits.token)
        if len(wires.indices) != len(bits.indices):
            self.at.fail(f"{len(wires.indices)} qubits are measured into {len(bits.indices)} bits", wires.token)
        self.at.expect(";")
        self.at.spend(OPERATION * len(wires.indices))
        pairs = zip(wires.indices, bits.indices, strict=True)
        self.emit(scope, [Operation(GATES["measure"], (wire,), bits=(bit,)) for wire, bit in pairs])

    def _read_reset(self, scope: Scope) -> None:
        wires = scope.operand(self.at)
        self.at.expect(";")
        self.at.spend(OPERATION * len(wires.indices))
        self.emit(scope, [Operation(GATES["reset"], (wire,)) for wire in wires.indices])

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
            self.at.spend(OPERATION + len(wires))
            scope.out.append(Operation(GATES["barrier"], tuple(wires)))
