"""Control flow of OpenQASM: `if` on measured bits becomes a condition of operations; what depends on numbers only is
decided while the text is read. A `while` on measured bits becomes so many repetitions, each under the loop's condition;
a shot in which it would go on behind the last one is an error, and never a wrong result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.quantum.circuit.gates import REPETITIONS, UNFINISHED
from unisono.quantum.circuit.operation import Controls, Operation
from unisono.quantum.qasm.expression import truth
from unisono.quantum.qasm.scope import Scope, between
from unisono.quantum.qasm.token import Token

if TYPE_CHECKING:
    from unisono.quantum.qasm.reader import QasmParser

_LONGEST_LOOP = 1 << 20  # of `for`
_LONGEST_WHILE = 1 << 16


class _Jump(Exception):
    """`break` or `continue`, on the way to its loop."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.leaves = leaves


def read_if(reader: QasmParser, scope: Scope, start: Token) -> None:
    at = reader.at
    if not _asks_bits(reader, scope):
        at.expect("(")
        holds = truth(at, scope.values, scope.version)
        at.expect(")")
        reader.block(scope) if holds else reader.skip_block()
        if at.skip("else"):
            reader.skip_block() if holds else reader.block(scope)
        return
    start = at.token
    condition = _conditions(reader, scope)
    first = len(scope.out)
    if _contradicts(reader, condition, scope, start):
        reader.skip_block()
    else:
        reader.block(scope.inner(condition=(*scope.condition, *condition)))
    made = scope.out[first:]  # each asks for the bits again, so that only the last may write them
    at.spend(len(made) + len(condition))
    _require_stable(reader, condition, made if at.sees("else") else made[:-1], start)
    if at.skip("else"):
        if len(condition) != 1:
            at.fail("'else' is read after a condition on one bit only", start)
        ((bit, value),) = condition
        reader.block(scope.inner(condition=(*scope.condition, (bit, 1 - value))))


def read_for(reader: QasmParser, scope: Scope, start: Token) -> None:
    at = reader.at
    if at.sees("int", "uint", "float", "angle", "bool"):
        at.next()
        if at.skip("["):
            scope.integer(at)
            at.expect("]")
    name = at.kind("name", "the loop's variable")
    at.expect("in")
    numbers = _loop_values(reader, scope)
    body = at.position
    for number in numbers:
        at.position = body
        if _leaves(reader, scope.inner(values=scope.values.new_child({name.text: number}))):
            break
    if not numbers:
        reader.skip_block()


def read_while(reader: QasmParser, scope: Scope, start: Token) -> None:
    at, head = reader.at, reader.at.position
    if _asks_bits(reader, scope):
        _unroll(reader, scope, start)
        return
    for _ in range(_LONGEST_WHILE):
        at.position = head
        at.expect("(")
        holds = truth(at, scope.values, scope.version)
        at.expect(")")
        if not holds:
            reader.skip_block()
        if not holds or _leaves(reader, scope):
            return
    at.fail(f"a loop of more than {_LONGEST_WHILE} iterations", start)


def _unroll(reader: QasmParser, scope: Scope, start: Token) -> None:
    """A `while` on measured bits."""
    at, head = reader.at, reader.at.position
    for _ in range(REPETITIONS):
        at.position = head
        condition = _conditions(reader, scope)
        if _contradicts(reader, condition, scope, start):
            reader.skip_block()
            return
        inner, first = scope.inner(condition=(*scope.condition, *condition)), len(scope.out)
        if _leaves(reader, inner):
            return
        made = scope.out[first:]
        at.spend(len(made) + len(condition))
        _require_stable(reader, condition, made[:-1], start)
        if not made or not {bit for bit, _ in condition} & set(made[-1].bits):
            at.fail("a 'while' on measured bits ends with their measurement, or it never would", start)
    reader.emit(inner, [Operation(UNFINISHED, made[-1].targets)])


def read_jump(reader: QasmParser, scope: Scope, start: Token) -> None:
    reader.at.expect(";")
    if not reader.loops:
        reader.at.fail(f"{start.text!r} outside of a loop", start)
    if scope.condition != reader.loops[-1]:
        reader.at.fail(f"{start.text!r} under a condition on measured bits is not read", start)
    raise _Jump(start.text == "break")


STATEMENTS: dict[str, Callable[[QasmParser, Scope, Token], None]] = {
    "if": read_if,
    "for": read_for,
    "while": read_while,
    "break": read_jump,
    "continue": read_jump,
}


def _leaves(reader: QasmParser, scope: Scope) -> bool:
    """Read the body of a loop once; whether it ends the loop."""
    reader.at.spend(2)
    reader.loops.append(scope.condition)
    start = reader.at.position
    try:
        reader.block(scope)
    except _Jump as jump:
        reader.at.position = start
        reader.skip_block()
        return jump.leaves
    finally:
        reader.loops.pop()
    return False


def _asks_bits(reader: QasmParser, scope: Scope) -> bool:
    """Whether the condition in parentheses at the cursor names a bit."""
    depth = 0
    for position in range(reader.at.position, len(reader.at.tokens)):
        token = reader.at.tokens[position]
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        if token.kind == "name" and token.text in scope.bits:
            return True
        if not depth:
            break
    return scope.version == 2


def _conditions(reader: QasmParser, scope: Scope) -> Controls:
    """What is asked for in parentheses at the cursor: all of these bits."""
    reader.at.expect("(")
    condition = _condition(reader, scope)
    while reader.at.skip("&&"):
        condition += _condition(reader, scope)
    reader.at.expect(")")
    return tuple(dict.fromkeys(condition))


def _contradicts(reader: QasmParser, condition: Controls, scope: Scope, start: Token) -> bool:
    """Whether the condition never holds inside those around it, whose bits must not have been written since."""
    outside = [pair for pair in scope.condition if (pair[0], 1 - pair[1]) in condition]
    _require_stable(reader, tuple(outside), scope.out[scope.since :], start)
    return bool(outside) or any((bit, 1 - value) in condition for bit, value in condition)


def _require_stable(reader: QasmParser, condition: Controls, made: Sequence[Operation], start: Token) -> None:
    """Each operation asks for the bits again, so that only the last may write them."""
    if any({bit for bit, _ in condition} & set(each.bits) for each in made):
        reader.at.fail("a bit that is asked for is written under its own condition, and more follows", start)


def _condition(reader: QasmParser, scope: Scope) -> tuple[tuple[int, int], ...]:
    negated = reader.at.skip("!")
    bits = scope.operand(reader.at, "bit")
    value = 1
    if reader.at.sees("==", "!="):
        negated ^= reader.at.next().text == "!="
        token = reader.at.token
        value = scope.integer(reader.at)
        if not 0 <= value < 2 ** len(bits.indices):
            reader.at.fail(f"{len(bits.indices)} bits are never {value}", token)
    elif not bits.single:
        reader.at.fail("a register is compared with ==", bits.token)
    if negated and len(bits.indices) > 1:
        reader.at.fail("'not equal' is read for one bit only", bits.token)
    return tuple((bit, (value >> index & 1) ^ negated) for index, bit in enumerate(bits.indices))


def _loop_values(reader: QasmParser, scope: Scope) -> Sequence[Any]:
    token = reader.at.token
    if token.kind == "name" and isinstance(found := scope.values.get(token.text), list):
        reader.at.next()
        reader.at.spend(len(found))
        return [*found]
    closing = {"[": "]", "{": "}"}.get(reader.at.token.text)
    if closing is None:
        reader.at.fail(f"expected [first:last] or {{a, b, c}}, but found {reader.at.shown()}")
    separator = ":" if reader.at.next().text == "[" else ","
    numbers = [scope.integer(reader.at)]
    while reader.at.skip(separator):
        numbers.append(scope.integer(reader.at))
    token = reader.at.expect(closing)
    if separator == ",":
        return numbers
    if len(numbers) not in (2, 3) or (len(numbers) == 3 and numbers[1] == 0):
        reader.at.fail("expected [first:last] or [first:step:last] with a step that is not 0", token)
    first, *step, last = numbers
    values = between(first, last, *step)
    if values[_LONGEST_LOOP:]:  # len() has a limit of its own
        count = abs(values[-1] - first) // abs(values.step) + 1
        reader.at.fail(f"a loop of {count} iterations: at most {_LONGEST_LOOP} are read", token)
    return values
