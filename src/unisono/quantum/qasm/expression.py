"""Expressions of OpenQASM: numbers, and angles that may be affine in the circuit's weights and features."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.quantum.circuit.parameter import Affine
from unisono.quantum.qasm.token import Cursor, Token

if TYPE_CHECKING:
    from unisono.quantum.qasm.scope import Scope

Value = int | float | Affine

CONSTANTS: dict[str, Value] = {
    **dict.fromkeys(("pi", "π"), math.pi),
    **dict.fromkeys(("tau", "τ"), math.tau),
    **dict.fromkeys(("euler", "ℇ"), math.e),
    "true": 1,
    "false": 0,
}
FUNCTIONS: dict[str, Callable[..., float]] = {
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "exp": math.exp,
    "ln": math.log,
    "log": math.log,
    "sqrt": math.sqrt,
    "arcsin": math.asin,
    "arccos": math.acos,
    "arctan": math.atan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "floor": math.floor,
    "ceiling": math.ceil,
    "mod": math.fmod,
    "pow": math.pow,
}
CASTS = ("float", "angle", "int", "uint")
_LARGEST_EXPONENT = 1024
_MOST_DIGITS = 1024
_LEVELS = (("+", "-"), ("*", "/", "%"))
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def evaluate(cursor: Cursor, values: Mapping[str, Any], version: int, level: int = 0) -> Value:
    """The value of the expression at the cursor, which moves behind it."""
    if level == len(_LEVELS):
        return _unary(cursor, values, version)
    left = evaluate(cursor, values, version, level + 1)
    while cursor.sees(*_LEVELS[level]):
        sign = cursor.next()
        left = _binary(cursor, sign, left, evaluate(cursor, values, version, level + 1), version)
    return left


def integer(cursor: Cursor, values: Mapping[str, Any], version: int) -> int:
    token = cursor.token
    value = evaluate(cursor, values, version)
    if not isinstance(value, int):
        cursor.fail(f"expected an integer, but this is {value}", token)
    return value


def _unary(cursor: Cursor, values: Mapping[str, Any], version: int) -> Value:
    if cursor.skip("-"):
        return _spent(cursor, -_unary(cursor, values, version))
    if cursor.skip("+"):
        return _unary(cursor, values, version)
    base = _atom(cursor, values, version)
    power = "^" if version == 2 else "**"
    if cursor.sees(power):
        sign = cursor.next()
        return _binary(cursor, sign, base, _unary(cursor, values, version), version)
    return base


def _atom(cursor: Cursor, values: Mapping[str, Any], version: int) -> Value:
    token = cursor.token
    cursor.spend(1)
    if cursor.skip("("):
        inner = evaluate(cursor, values, version)
        cursor.expect(")")
        return inner
    if token.kind in ("integer", "real"):
        cursor.next()
        digits = token.text.replace("_", "")
        base = 0 if digits[:2].lower() in ("0x", "0b") else 10
        if len(digits) > _MOST_DIGITS:
            cursor.fail(f"a number of {len(digits)} digits; at most {_MOST_DIGITS} are read", token)
        return _checked(cursor, token, lambda: float(digits) if token.kind == "real" else int(digits, base))
    cursor.kind("name", "a number or an expression")
    if token.text in values:
        return _read(cursor, token, values, version)
    if token.text == "sizeof":
        cursor.expect("(")
        found = values.get(cursor.kind("name", "an array").text)
        cursor.expect(")")
        return len(found) if isinstance(found, list) else cursor.fail("expected the name of an array", token)
    if token.text in CONSTANTS:
        return CONSTANTS[token.text]
    if token.text in FUNCTIONS:
        return _call(cursor, token, values, version)
    if token.text not in CASTS:
        cursor.fail(f"{token.text!r} is not defined", token)
    return _cast(cursor, token, values, version)


def _cast(cursor: Cursor, token: Token, values: Mapping[str, Any], version: int) -> Value:
    if cursor.skip("["):
        evaluate(cursor, values, version)
        cursor.expect("]")
    cursor.expect("(")
    value = evaluate(cursor, values, version)
    cursor.expect(")")
    if token.text in ("float", "angle"):
        return value if isinstance(value, Affine) else _checked(cursor, token, lambda: float(value))
    return _checked(cursor, token, lambda: int(_plain(cursor, token, value)))


def _call(cursor: Cursor, token: Token, values: Mapping[str, Any], version: int) -> Value:
    cursor.expect("(")
    arguments = [_plain(cursor, token, evaluate(cursor, values, version))]
    while cursor.skip(","):
        arguments.append(_plain(cursor, token, evaluate(cursor, values, version)))
    cursor.expect(")")
    return _checked(cursor, token, lambda: FUNCTIONS[token.text](*arguments))


def _binary(cursor: Cursor, sign: Token, left: Value, right: Value, version: int) -> Value:
    def compute() -> Any:
        a: Any = left
        b: Any = right
        match sign.text:
            case "+":
                return a + b
            case "-":
                return a - b
            case "*":
                return a * b
            case "/" if version > 2 and isinstance(a, int) and isinstance(b, int):
                return int(a / b)  # OpenQASM 3 divides integers as C does
            case "/":
                return a / _plain(cursor, sign, b)
            case "%":
                return _plain(cursor, sign, a) % _plain(cursor, sign, b)
        base, exponent = _plain(cursor, sign, a), _plain(cursor, sign, b)
        if abs(exponent) > _LARGEST_EXPONENT:
            base = float(base)  # a whole number of so many digits would take for ever
        return base**exponent

    return _spent(cursor, _checked(cursor, sign, compute))


def _spent(cursor: Cursor, value: Value) -> Value:
    """Pay for the terms of a new angle: there may be as many as inputs."""
    if isinstance(value, Affine):
        cursor.spend(len(value.weights) + len(value.features))
    return value


def _plain(cursor: Cursor, token: Token, value: Value) -> float:
    if isinstance(value, Affine):
        if not value.is_constant:
            cursor.fail(f"{token.text!r} of an input is not affine; only sums and multiples of inputs are read", token)
        return value.constant
    return value


def _checked(cursor: Cursor, token: Token, compute: Callable[[], Any]) -> Any:
    try:
        value = compute()
    except (ArithmeticError, ValueError, TypeError, UsageError) as error:
        cursor.fail(f"cannot compute {token.text!r}: {error}", token)
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        cursor.fail(f"{token.text!r} gives a number of {len(bin(value)) - 2} bits, which is too large", token)
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        cursor.fail(f"{token.text!r} gives {value}, which is no finite real number", token)
    return value


# ---- conditions, arrays and assignments, computed while the text is read --------------------------------------------


def truth(cursor: Cursor, values: Mapping[str, Any], version: int) -> bool:
    """The value of a condition on numbers at the cursor: comparisons joined by && and ||."""
    found = _all(cursor, values, version)
    while cursor.skip("||"):
        found = _all(cursor, values, version) or found
    return found


def _all(cursor: Cursor, values: Mapping[str, Any], version: int) -> bool:
    found = _compared(cursor, values, version)
    while cursor.skip("&&"):
        found = _compared(cursor, values, version) and found
    return found


def _compared(cursor: Cursor, values: Mapping[str, Any], version: int) -> bool:
    if cursor.skip("!"):
        return not _compared(cursor, values, version)
    token = cursor.token
    if cursor.sees("("):  # around a number, or around a condition
        inside = cursor.at(cursor.position + 1)
        try:
            evaluate(inside, values, version)
            is_number = inside.sees(")")
        except UsageError:
            is_number = False
        if not is_number:
            cursor.next()
            found = truth(cursor, values, version)
            cursor.expect(")")
            return found
    left = _plain(cursor, token, evaluate(cursor, values, version))
    if not cursor.sees(*_COMPARISONS):
        return bool(left)
    sign = cursor.next()
    return _COMPARISONS[sign.text](left, _plain(cursor, sign, evaluate(cursor, values, version)))


def array(cursor: Cursor, scope: Scope, sizes: tuple[int, ...]) -> list[Any]:
    """The initial value of an array: nested lists, or zeros."""
    if not sizes:
        cursor.fail("an array without sizes: expected array[type, size] name")
    cursor.spend(math.prod(sizes) if not cursor.sees("=") else 0)
    if not cursor.skip("="):
        return _zeros(sizes)
    return _elements(cursor, scope, sizes)


def _zeros(sizes: tuple[int, ...]) -> list[Any]:
    return [_zeros(sizes[1:]) if sizes[1:] else 0 for _ in range(sizes[0])]


def _elements(cursor: Cursor, scope: Scope, sizes: tuple[int, ...]) -> list[Any]:
    start = cursor.expect("{")
    found = [_elements(cursor, scope, sizes[1:]) if sizes[1:] else scope.number(cursor)]
    while cursor.skip(","):
        found.append(_elements(cursor, scope, sizes[1:]) if sizes[1:] else scope.number(cursor))
    cursor.expect("}")
    if len(found) != sizes[0]:
        cursor.fail(f"{len(found)} elements for an array of {sizes[0]}", start)
    return found


def assign(cursor: Cursor, scope: Scope) -> None:
    """`x = 2;`, `x += 1;`, `a[2] = x;`: changes the variable in the scope that declares it."""
    token = cursor.next()
    held = next(values for values in scope.values.maps if token.text in values)
    if isinstance(held[token.text], Affine):
        cursor.fail(f"{token.text!r} is an input; it cannot be assigned", token)
    depth = len(scope.values.maps) - 1 - next(at for at, values in enumerate(scope.values.maps) if values is held)
    if depth < scope.fixed:
        cursor.fail(
            f"{token.text!r} is declared outside of this condition or subroutine; it cannot be assigned here", token
        )
    into: Any = held
    key: Any = token.text
    while cursor.sees("[") and isinstance(into[key], list):
        into, key = _element(cursor, into[key], scope.values, scope.version)
    if isinstance(into[key], list):
        cursor.fail(f"{token.text!r} is an array; its elements are assigned one by one", token)
    sign = cursor.next()
    if sign.text in ("+", "-", "*", "/") and cursor.sees("="):
        cursor.next()
        into[key] = _binary(cursor, sign, into[key], scope.number(cursor), scope.version)
    elif sign.text == "=":
        into[key] = scope.number(cursor)
    else:
        cursor.fail(f"expected '=', but found {sign.text!r}", sign)
    cursor.expect(";")


def _element(cursor: Cursor, found: list[Any], values: Mapping[str, Any], version: int) -> tuple[list[Any], int]:
    """The list and the index in it that brackets at the cursor name; `a[1, 2]` is `a[1][2]`."""
    cursor.expect("[")
    while True:
        token = cursor.token
        index = integer(cursor, values, version)
        if not -len(found) <= index < len(found):
            cursor.fail(f"index {index} is out of range; the array has {len(found)}", token)
        if not cursor.skip(","):
            break
        if not isinstance(found[index], list):
            cursor.fail("the array has fewer dimensions than this", token)
        found = found[index]
    cursor.expect("]")
    return found, index


def _read(cursor: Cursor, token: Token, values: Mapping[str, Any], version: int) -> Any:
    """A variable's value, an element of an array, or what a subroutine of numbers returns."""
    found = values[token.text]
    if callable(found):
        return found(cursor, token, values)
    while isinstance(found, list) and cursor.sees("["):
        inside, index = _element(cursor, found, values, version)
        found = inside[index]
    if isinstance(found, list):
        cursor.fail(f"{token.text!r} is an array; expected an element of it", token)
    return found
