"""Expressions of OpenQASM: numbers, and angles that may be affine in the circuit's weights and features."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from unisono.errors import UsageError
from unisono.quantum.circuit.parameter import Affine
from unisono.quantum.qasm.token import Cursor, Token

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
_LEVELS = (("+", "-"), ("*", "/", "%"))


def evaluate(cursor: Cursor, values: Mapping[str, Value], version: int, level: int = 0) -> Value:
    """The value of the expression at the cursor, which moves behind it."""
    if level == len(_LEVELS):
        return _unary(cursor, values, version)
    left = evaluate(cursor, values, version, level + 1)
    while cursor.sees(*_LEVELS[level]):
        sign = cursor.next()
        left = _binary(cursor, sign, left, evaluate(cursor, values, version, level + 1), version)
    return left


def integer(cursor: Cursor, values: Mapping[str, Value], version: int) -> int:
    token = cursor.token
    value = evaluate(cursor, values, version)
    if not isinstance(value, int):
        cursor.fail(f"expected an integer, but this is {value}", token)
    return value


def _unary(cursor: Cursor, values: Mapping[str, Value], version: int) -> Value:
    if cursor.skip("-"):
        return -_unary(cursor, values, version)
    if cursor.skip("+"):
        return _unary(cursor, values, version)
    base = _atom(cursor, values, version)
    power = "^" if version == 2 else "**"
    if cursor.sees(power):
        sign = cursor.next()
        return _binary(cursor, sign, base, _unary(cursor, values, version), version)
    return base


def _atom(cursor: Cursor, values: Mapping[str, Value], version: int) -> Value:
    token = cursor.token
    if cursor.skip("("):
        inner = evaluate(cursor, values, version)
        cursor.expect(")")
        return inner
    if token.kind == "integer":
        return int(cursor.next().text.replace("_", ""), 0 if token.text[:2].lower() in ("0x", "0b") else 10)
    if token.kind == "real":
        return float(cursor.next().text.replace("_", ""))
    cursor.kind("name", "a number or an expression")
    if token.text in values:
        return values[token.text]
    if token.text in CONSTANTS:
        return CONSTANTS[token.text]
    if token.text in FUNCTIONS:
        return _call(cursor, token, values, version)
    if token.text not in CASTS:
        cursor.fail(f"{token.text!r} is not defined", token)
    return _cast(cursor, token, values, version)


def _cast(cursor: Cursor, token: Token, values: Mapping[str, Value], version: int) -> Value:
    if cursor.skip("["):
        evaluate(cursor, values, version)
        cursor.expect("]")
    cursor.expect("(")
    value = evaluate(cursor, values, version)
    cursor.expect(")")
    if token.text in ("float", "angle"):
        return value if isinstance(value, Affine) else float(value)
    return _checked(cursor, token, lambda: int(_plain(cursor, token, value)))


def _call(cursor: Cursor, token: Token, values: Mapping[str, Value], version: int) -> Value:
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

    return _checked(cursor, sign, compute)


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
