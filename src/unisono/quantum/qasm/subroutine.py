"""Subroutines of OpenQASM 3: `def name(qubit q, int n) -> bit { ... return measure q; }`.

A body is read again at each call, so that calls become the operations they stand for. A subroutine of numbers only can
be called in expressions. Bits that it returns are those that its body has measured; where they are assigned, the
measurements write the bits that are assigned."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unisono.quantum.circuit.gates import GATES
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.qasm.catalogue import Known
from unisono.quantum.qasm.scope import Definition, Operand, Scope
from unisono.quantum.qasm.token import NOTHING, OPERATION, Cursor, Token

if TYPE_CHECKING:
    from unisono.quantum.qasm.reader import QasmParser

_NUMBERS = ("int", "uint", "float", "angle", "bool")
_DEEPEST = 64


@dataclass(frozen=True)
class Parameter:
    """kind: "qubit", "bit" or "number". size: of a register; None for one qubit or bit."""

    kind: str
    size: int | None
    name: Token


@dataclass(frozen=True)
class Subroutine:
    name: str
    parameters: tuple[Parameter, ...]
    returns: str  # "bit", "number" or ""
    body: Cursor  # behind the brace
    gates: dict[str, Known | Definition]


class _Return(Exception):
    """`return`, on the way to the call: bits, a number, or None."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def read_def(reader: QasmParser, scope: Scope) -> None:
    at = reader.at
    name = reader.new_name(scope)
    if name.text in reader.subroutines or name.text in reader.defined:
        at.fail(f"{name.text!r} is already defined", name)
    if reader.calling or scope.condition:
        at.fail("a subroutine is defined outside of others and of conditions", name)
    parameters: list[Parameter] = []
    at.expect("(")
    while not at.sees(")"):
        parameters.append(_parameter(reader, scope))
        if not at.skip(","):
            break
    at.expect(")")
    if len({each.name.text for each in parameters}) != len(parameters):
        at.fail(f"subroutine {name.text!r} uses a name twice", name)
    returns = ""
    if at.skip("->"):
        returns = _type(reader, scope)[0]
        if returns == "qubit":
            at.fail("a subroutine cannot return qubits", name)
    if not at.sees("{"):
        at.expect("{")
    end, body = at.block_end(), at.at(at.position + 1)
    made = Subroutine(name.text, tuple(parameters), returns, body, scope.gates_in(body, end))
    reader.subroutines[name.text] = made
    if returns == "number" and all(each.kind == "number" for each in parameters):
        scope.values[name.text] = lambda *where: _number(reader, made, *where)
    at.position = end + 1


def call_subroutine(reader: QasmParser, scope: Scope) -> Any:
    """Run the call at the cursor, which stops behind it; what it returns."""
    at = reader.at
    token = at.kind("name", "a subroutine")
    at.spend(12)
    made = reader.subroutines[token.text]
    at.expect("(")
    inner = Scope(scope.version, made.gates, {}, {}, reader.scope.values.new_child(), scope.out, scope.condition)
    inner.fixed = len(reader.scope.values.maps)
    inner.since = scope.since
    for number, parameter in enumerate(made.parameters):
        if (number and not at.skip(",")) or at.sees(")"):
            at.fail(f"{token.text!r} takes {len(made.parameters)} arguments, but got {number}", token)
        _bind(reader, scope, inner, parameter)
    if not at.sees(")"):
        at.fail(f"{token.text!r} takes {len(made.parameters)} arguments, but got more", token)
    at.next()
    wires = [wire for operand in inner.qubits.values() for wire in operand.indices]
    if len(set(wires)) != len(wires):
        at.fail(f"{token.text!r} is given a qubit twice", token)
    inner.read_only = frozenset(inner.bits)
    before = len(scope.out)
    found = _run(reader, made, inner, token)
    at.spend(0 if made.returns or len(scope.out) > before or not reader.calling else NOTHING)
    return found


def call_into(reader: QasmParser, scope: Scope, into: Operand) -> None:
    """`c[0] = name(q);`: what the call measures into the bits that it returns goes to these bits instead."""
    token, first, before = reader.at.token, len(scope.out), reader.bits
    found = call_subroutine(reader, scope)
    if into.token.text in scope.read_only:
        reader.at.fail(f"{into.token.text!r} is a parameter of a subroutine; it is read only", into.token)
    if not isinstance(found, tuple):
        reader.at.fail(f"{token.text!r} returns no bits", token)
    if len(found) != len(into.indices):
        reader.at.fail(f"{token.text!r} returns {len(found)} bits, which are assigned to {len(into.indices)}", token)
    reader.at.spend(2 * (len(scope.out) - first))
    used = {bit for each in scope.out[first:] for bit in (*each.bits, *(bit for bit, _ in each.condition))}
    inside = {bit for bit, _ in scope.condition} | used
    if len(set(found)) != len(found) or min(found) < before or inside & set(into.indices):
        reader.at.fail(f"the bits that {token.text!r} returns are not its own, or are used in it", token)
    new = dict(zip(found, into.indices, strict=True))
    for number, each in enumerate(scope.out[first:], first):
        bits = tuple(new.get(bit, bit) for bit in each.bits)
        condition = tuple((new.get(bit, bit), value) for bit, value in each.condition)
        scope.out[number] = replace(each, bits=bits, condition=condition)
    if set(range(before, reader.bits)) == set(found):
        reader.bits = before


def read_return(reader: QasmParser, scope: Scope) -> None:
    at = reader.at
    token = at.tokens[at.position - 1]
    if not reader.calling:
        at.fail("'return' outside of a subroutine", token)
    name, condition = reader.calling[-1]
    if scope.condition != condition:
        at.fail("'return' under a condition on measured bits is not read", token)
    returns = reader.subroutines[name].returns
    if bool(returns) == at.sees(";"):
        at.fail(f"{name!r} is declared to return {returns or 'nothing'}", token)
    value: Any = None
    if returns == "number":
        value = scope.number(at)
    elif returns == "bit" and at.skip("measure"):
        wires = scope.operand(at).indices
        value = tuple(range(reader.bits, reader.bits + len(wires)))
        reader.bits += len(wires)
        at.spend(OPERATION * len(wires))
        pairs = zip(wires, value, strict=True)
        reader.emit(scope, [Operation(GATES["measure"], (wire,), bits=(bit,)) for wire, bit in pairs])
    elif returns == "bit":
        value = scope.operand(at, "bit").indices
    at.expect(";")
    raise _Return(value)


# ---- inside ---------------------------------------------------------------------------------------------------------


def _run(reader: QasmParser, made: Subroutine, inner: Scope, token: Token) -> Any:
    if len(reader.calling) >= _DEEPEST:
        reader.at.fail(f"{made.name!r} is called {_DEEPEST} subroutines deep", token)
    outer, reader.at = reader.at, made.body.at(made.body.position)
    outer_loops, reader.loops = reader.loops, []
    reader.calling.append((made.name, inner.condition))
    try:
        while not reader.at.sees("}"):
            reader.statement(inner)
        if made.returns:
            reader.at.fail(f"{made.name!r} ends without a 'return'")
        return None
    except _Return as found:
        return found.value
    finally:
        reader.calling.pop()
        reader.at, reader.loops = outer, outer_loops


def _number(reader: QasmParser, made: Subroutine, cursor: Cursor, token: Token, values: ChainMap[str, Any]) -> Any:
    """A call in an expression. The cursor may be the reader's own, or one beside it."""
    outer, reader.at = reader.at, cursor
    cursor.position -= 1
    scope = Scope(3, made.gates, {}, {}, values, [], ())
    try:
        found = call_subroutine(reader, scope)
    finally:
        reader.at = outer
    if scope.out:
        cursor.fail(f"{made.name!r} has operations on qubits; it cannot be called in an expression", token)
    return found


def _parameter(reader: QasmParser, scope: Scope) -> Parameter:
    kind, size = _type(reader, scope)
    return Parameter(kind, size, reader.at.kind("name", "a parameter's name"))


def _type(reader: QasmParser, scope: Scope) -> tuple[str, int | None]:
    token = reader.at.kind("name", "a type")
    if token.text not in ("qubit", "bit", *_NUMBERS):
        expected = ", ".join(("qubit", "bit", *_NUMBERS))
        reader.at.fail(f"{token.text!r} as a type in a subroutine is not read; expected one of {expected}", token)
    size = reader.size(scope) if reader.at.sees("[") else None
    return token.text if token.text in ("qubit", "bit") else "number", size


def _bind(reader: QasmParser, scope: Scope, inner: Scope, parameter: Parameter) -> None:
    at, name = reader.at, parameter.name.text
    if parameter.kind == "number":
        inner.values[name] = scope.number(at)
        return
    given = scope.operand(at, parameter.kind)
    if given.single != (parameter.size is None) or len(given.indices) != (parameter.size or 1):
        wanted = f"{parameter.kind}[{parameter.size}]" if parameter.size else f"one {parameter.kind}"
        at.fail(f"parameter {name!r} is {wanted}, but {given.token.text!r} has {len(given.indices)}", given.token)
    into = inner.qubits if parameter.kind == "qubit" else inner.bits
    into[name] = Operand(given.indices, given.single, given.token)
