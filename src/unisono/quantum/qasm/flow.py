"""Control flow of OpenQASM: `if` on measured bits becomes a condition of operations; what depends on numbers only is
decided while the text is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    at.expect("(")
    condition = _condition(reader, scope)
    while at.skip("&&"):
        condition += _condition(reader, scope)
    at.expect(")")
    first = len(scope.out)
    if any((bit, 1 - value) in (*condition, *scope.condition) for bit, value in condition):
        reader.skip_block()
    else:
        reader.block(scope.inner(condition=(*scope.condition, *dict.fromkeys(condition))))
    made = scope.out[first:]  # each asks for the bits again, so that only the last may write them
    if any({bit for bit, _ in condition} & set(each.bits) for each in (made if at.sees("else") else made[:-1])):
        at.fail("a bit that is asked for is written under its own condition, and more follows", start)
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
        at.fail("a 'while' on measured bits is not read: how often it runs is only known when the circuit does", start)
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
    reader.count()
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
    for token in reader.at.tokens[reader.at.position :]:
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        if token.kind == "name" and token.text in scope.bits:
            return True
        if not depth:
            break
    return scope.version == 2


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


def _loop_values(reader: QasmParser, scope: Scope) -> list[Any]:
    token = reader.at.token
    if token.kind == "name" and isinstance(found := scope.values.get(token.text), list):
        reader.at.next()
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
    if len(values) > _LONGEST_LOOP:
        reader.at.fail(f"a loop of {len(values)} iterations: at most {_LONGEST_LOOP} are read", token)
    return [*values]
