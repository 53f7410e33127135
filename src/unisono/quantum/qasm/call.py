"""One call of a gate: modifiers, angles, operands, and its operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Affine, affine
from unisono.quantum.qasm.catalogue import Known, operations, power
from unisono.quantum.qasm.scope import Definition, Operand, Scope
from unisono.quantum.qasm.token import NOTHING, OPERATION, Cursor, Token

if TYPE_CHECKING:
    from unisono.quantum.qasm.reader import QasmParser

_HIGHEST_POWER = 1 << 20
_OF_THREE = {
    "qubit",
    "bit",
    "let",
    "for",
    "while",
    "const",
    "input",
    "int",
    "uint",
    "float",
    "angle",
    "ctrl",
    "negctrl",
    "inv",
    "pow",
}


def call(reader: QasmParser, scope: Scope) -> list[Operation]:
    """The operations of the call at the reader's cursor, which stops before the semicolon."""
    at = reader.at
    modifiers = _modifiers(at, scope)
    token = at.kind("name", "a gate")
    if token.text not in scope.gates:
        at.fail(_unknown(token, scope), token)
    gate = scope.gates[token.text]
    angles = _angles(at, scope)
    operands = [] if at.sees(";") else [scope.operand(at)]
    while operands and at.skip(","):
        operands.append(scope.operand(at))
    wanted = gate.parameters if isinstance(gate, Known) else len(gate.parameters)
    if len(angles) != wanted:
        at.fail(f"{token.text!r} takes {wanted} angles, but got {len(angles)}", token)
    controls = sum(int(count) for word, count in modifiers if word in ("ctrl", "negctrl"))
    needed = controls + (gate.operands if isinstance(gate, Known) else len(gate.operands))
    if len(operands) != needed:
        at.fail(f"{token.text!r} acts on {needed} qubits here, but got {len(operands)}", token)
    terms = sum(len(each.weights) + len(each.features) for each in angles)
    made: list[Operation] = []
    for wires in _broadcast(at, token, operands):
        inner = wires[controls:]
        if isinstance(gate, Definition):
            one = reader.expand(gate, angles, inner)
            at.spend(0 if one or not scope.inside_gate else NOTHING)
        else:
            at.spend(OPERATION)
            one = operations(gate, angles, inner, exact=bool(modifiers) or scope.inside_gate)
        one = _modified(at, token, one, modifiers, wires[:controls])
        at.spend(len(one) * (1 + controls + terms) + len(wires))
        made += one
    return made


def _modifiers(at: Cursor, scope: Scope) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    while scope.version > 2 and at.sees("ctrl", "negctrl", "inv", "pow"):
        token = at.next()
        count: float = 1
        if token.text != "inv" and at.skip("("):
            value = scope.number(at)
            if isinstance(value, Affine) or (token.text != "pow" and (not isinstance(value, int) or value < 1)):
                at.fail(f"{token.text}({value}): expected a number of 1 or more", token)
            count = value
            at.expect(")")
        elif token.text == "pow":
            at.expect("(")
        at.expect("@")
        found.append((token.text, count))
    return found


def _angles(at: Cursor, scope: Scope) -> list[Affine]:
    angles: list[Affine] = []
    if at.skip("("):
        while not at.sees(")"):
            angles.append(affine(scope.number(at)))
            if not at.skip(","):
                break
        at.expect(")")
    return angles


def _broadcast(at: Cursor, token: Token, operands: list[Operand]) -> list[list[int]]:
    """One list of wires for each element of the registers; single qubits are used again for each."""
    sizes = {len(operand.indices) for operand in operands if not operand.single}
    if len(sizes) > 1:
        at.fail(f"{token.text!r} is given registers of different sizes: {sorted(sizes)}", token)
    rows = []
    for row in range(sizes.pop() if sizes else 1):
        wires = [operand.indices[0 if operand.single else row] for operand in operands]
        if len(set(wires)) != len(wires):
            at.fail(f"{token.text!r} names a qubit twice", token)
        rows.append(wires)
    return rows


def _modified(
    at: Cursor, token: Token, made: list[Operation], modifiers: list[tuple[str, float]], controls: list[int]
) -> list[Operation]:
    """Modifiers apply from the gate outwards; the outermost one owns the first controls."""
    left = list(controls)
    for word, count in reversed(modifiers):
        if word == "inv":
            made = [each.inverse() for each in reversed(made)]
        elif word == "pow":
            if abs(count) * max(len(made), 1) > _HIGHEST_POWER:
                at.fail(f"pow({count:g}) of {token.text!r}: at most {_HIGHEST_POWER} operations are made of it", token)
            at.spend(OPERATION * int(abs(count)) * len(made))
            powered = power(made, count)
            if powered is None:
                at.fail(f"pow({count:g}) of {token.text!r}: expected a whole number, or one rotation or phase", token)
            made = powered
        else:
            taken = left[len(left) - int(count) :]
            left = left[: len(left) - int(count)]
            pairs = tuple((wire, int(word == "ctrl")) for wire in taken)
            made = [each.controlled(pairs) for each in made]
    return made


def _unknown(token: Token, scope: Scope) -> str:
    if scope.version == 2 and token.text in _OF_THREE:
        return f"{token.text!r} is a word of OpenQASM 3; a text of it begins with `OPENQASM 3.0;`"
    library = "qelib1.inc" if scope.version == 2 else "stdgates.inc"
    if "h" not in scope.gates:
        return f'gate {token.text!r} is not defined; is `include "{library}";` missing?'
    return f"gate {token.text!r} is not defined, and {library} does not have it"
