"""Writes circuits as OpenQASM 2 or 3.

Angles are written with all their digits, so that reading gives the same circuit. OpenQASM 2 has no global phase (it is
left out where nothing can see it), no free angles (bind them first) and few controls (more are decomposed).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

from unisono.errors import UsageError
from unisono.quantum.circuit.channels import Channel
from unisono.quantum.circuit.gates import CONTROLLED, GATES
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Affine
from unisono.quantum.qasm.decompose import few_controls, named, two_level

if TYPE_CHECKING:
    from unisono.quantum.circuit.circuit import Circuit

DEFINITIONS = {  # gates that one of the standard files lacks, in terms of what both have
    "rzz": "gate rzz(a) p, q { cx p, q; rz(a) q; cx p, q; }",
    "rxx": "gate rxx(a) p, q { h p; h q; cx p, q; rz(a) q; cx p, q; h p; h q; }",
    "ryy": "gate ryy(a) p, q { rx(pi/2) p; rx(pi/2) q; cx p, q; rz(a) q; cx p, q; rx(-pi/2) p; rx(-pi/2) q; }",
    "rzx": "gate rzx(a) p, q { h q; cx p, q; rz(a) q; cx p, q; h q; }",
    "rot": "gate rot(a, b, c) q { rz(a) q; ry(b) q; rz(c) q; }",
    "iswap": "gate iswap p, q { s p; s q; h p; cx p, q; cx q, p; h q; }",
    "iswapdg": "gate iswapdg p, q { h q; cx q, p; cx p, q; h p; sdg q; sdg p; }",
    "sxdg": "gate sxdg q { h q; sdg q; h q; }",
    "sx": "gate sx q { h q; s q; h q; }",
    "swap": "gate swap p, q { cx p, q; cx q, p; cx p, q; }",
    "cswap": "gate cswap c, p, q { cx q, p; ccx c, p, q; cx q, p; }",
    "crx": "gate crx(a) c, q { h q; crz(a) c, q; h q; }",
    "cry": "gate cry(a) c, q { ry(a/2) q; cx c, q; ry(-a/2) q; cx c, q; }",
}
_NAMES = {(gate, count): name for name, (gate, count) in reversed(CONTROLLED.items())}
_SHARED = {"id", "x", "y", "z", "h", "s", "sdg", "t", "tdg", "rx", "ry", "rz", "u2", "u3"}
_SHARED |= {"cx", "cy", "cz", "ch", "ccx", "crz"}
_STANDARD = {2: _SHARED | {"u1", "cu1", "cu3"}}  # of the first qelib1.inc; later ones have more
_STANDARD[3] = _SHARED | {"p", "cp", "sx", "gphase", "swap", "cswap", "crx", "cry"}


def dumps(circuit: Circuit, version: int = 3) -> str:
    """The circuit as a text of that version."""
    if not isinstance(version, int) or version not in (2, 3):
        raise UsageError(f"OpenQASM version {version!r}: expected 2 or 3")
    if version == 2 and (circuit.weights or circuit.features):
        raise UsageError("OpenQASM 2 has no free angles; bind the circuit first: circuit.bound(weights, features)")
    for each in circuit.operations:
        if isinstance(each.gate, Channel):
            raise UsageError(f"{each}: OpenQASM has no channels; write the circuit without its noise")
    writer = Writer(circuit, version)
    return "\n".join(writer.lines()) + "\n"


class Writer:
    def __init__(self, circuit: Circuit, version: int) -> None:
        self.circuit = circuit
        self.version = version
        self.used: dict[str, None] = {}
        self.apart = version == 2 and any(each.condition for each in circuit.operations)

    def lines(self) -> list[str]:
        body = [line for each in self.circuit.operations for line in self._operation(each)]
        library = "qelib1.inc" if self.version == 2 else "stdgates.inc"
        head = [f"OPENQASM {self.version}.0;", f'include "{library}";', *self._inputs()]
        head += [DEFINITIONS[name] for name in self.used]
        wires, bits = self.circuit.wires, self.circuit.bits
        head.append(f"qreg q[{wires}];" if self.version == 2 else f"qubit[{wires}] q;")
        if self.apart:
            head += [f"creg c{bit}[1];" for bit in range(bits)]
        elif bits:
            head.append(f"creg c[{bits}];" if self.version == 2 else f"bit[{bits}] c;")
        return head + body

    def _inputs(self) -> Iterable[str]:
        terms = [each.terms() for each in self.circuit.operations]
        for kind, at in (("weight", 0), ("feature", 1)):
            for index in sorted({index for each in terms for index, _ in each[at]}):
                yield f"input float[64] {kind}_{index};"

    def _operation(self, operation: Operation) -> list[str]:
        prefix = self._condition(operation)
        wire = _wires(operation.targets)
        match operation.name:
            case "barrier":
                return [f"barrier {wire};"]
            case "reset":
                return [f"{prefix}reset {wire};"]
            case "unfinished":
                raise UsageError("a 'while' on measured bits is unrolled when it is read, and cannot be written again")
            case "measure":
                bit = self._bit(operation.bits[0])
                return [
                    f"{prefix}measure {wire} -> {bit};" if self.version == 2 else f"{prefix}{bit} = measure {wire};"
                ]
        chunks = [chunk for each in named(operation) for chunk in self._chunks(replace(each, condition=()))]
        return [prefix + chunk for chunk in chunks]

    def _condition(self, operation: Operation) -> str:
        if not operation.condition:
            return ""
        if self.version == 3:
            asked = [f"{self._bit(bit)} == {value}" for bit, value in operation.condition]
            return f"if ({' && '.join(asked)}) "
        if len(operation.condition) > 1:
            raise UsageError(f"{operation} asks for several bits, which OpenQASM 2 cannot; use version=3")
        ((bit, value),) = operation.condition
        return f"if(c{bit}=={value}) "

    def _bit(self, bit: int) -> str:
        return f"c{bit}[0]" if self.apart else f"c[{bit}]"

    def _chunks(self, operation: Operation) -> list[str]:
        return self._second(operation) if self.version == 2 else self._third(operation)

    def _third(self, operation: Operation) -> list[str]:
        if operation.name in ("u2", "u3") and operation.controls:  # the library's differ from ours by a phase
            theta, phi, lam = operation.parameters if operation.name == "u3" else (_QUARTER, *operation.parameters)
            phase = Operation(GATES["gphase"], (), operation.controls, (theta * -0.5,))
            rotation = self._line("U", (theta, phi, lam), operation.wires, _modifiers(operation))
            return [rotation, *self._third(phase)]
        ones = all(value for _, value in operation.controls)
        short = _NAMES.get((operation.name, len(operation.controls)), "") if ones else ""
        if short in _STANDARD[3]:
            return [self._line(short, operation.parameters, operation.wires)]
        return [self._line(operation.name, operation.parameters, operation.wires, _modifiers(operation))]

    def _second(self, operation: Operation) -> list[str]:
        if operation.name == "gphase":
            if not operation.controls:
                return []
            *others, (wire, value) = operation.controls
            lowered = Operation(GATES["p"], (wire,), tuple(others), operation.parameters)
            flips = [Operation(GATES["x"], (wire,))] * (value == 0)
            return [line for each in (*flips, lowered, *flips) for line in self._second(each)]
        count = len(operation.controls)
        name = _NAMES.get((operation.name, count), "") if count else operation.name
        name = {"p": "u1", "cp": "cu1"}.get(name, name)
        if all(value for _, value in operation.controls) and (name in _STANDARD[2] or name in DEFINITIONS):
            return [self._line(name, operation.parameters, operation.wires)]
        smaller = few_controls(operation) if len(operation.targets) == 1 else two_level(operation)
        return [line for each in smaller for line in self._second(each)]

    def _line(self, name: str, angles: Iterable[Affine], wires: Iterable[int], modifiers: str = "") -> str:
        if name not in _STANDARD[self.version] and name != "U":
            self.used[name] = None
        written = ", ".join(self._angle(angle) for angle in angles)
        return f"{modifiers}{name}{f'({written})' if written else ''} {_wires(wires)}".rstrip() + ";"

    def _angle(self, angle: Affine) -> str:
        words = [f"{_number(scale)}*weight_{index}" for index, scale in angle.weights]
        words += [f"{_number(scale)}*feature_{index}" for index, scale in angle.features]
        if angle.constant or not words:
            words.append(_number(angle.constant))
        return " + ".join(words)


_QUARTER = Affine(math.pi / 2)


def _wires(wires: Iterable[int]) -> str:
    return ", ".join(f"q[{wire}]" for wire in wires)


def _modifiers(operation: Operation) -> str:
    words = []
    for value, run in groupby(value for _, value in operation.controls):
        count = len([*run])
        words.append(("ctrl" if value else "negctrl") + (f"({count})" if count > 1 else "") + " @ ")
    return "".join(words)


def _number(value: float) -> str:
    """A fraction of pi where that is the same number, else all digits, with the point that OpenQASM 2 asks for."""
    share = Fraction(value / math.pi).limit_denominator(64)
    if share and share.numerator * math.pi / share.denominator == value:
        top = {1: "pi", -1: "-pi"}.get(share.numerator, f"{share.numerator}*pi")
        return top + (f"/{share.denominator}" if share.denominator > 1 else "")
    digits = repr(float(value))
    if "e" in digits and "." not in digits:
        digits = digits.replace("e", ".0e")
    return digits
