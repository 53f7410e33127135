"""The gates that a text can call without defining them: the built-in ones, qelib1.inc and stdgates.inc."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.quantum.circuit.gates import CONTROLLED, GATES
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Affine


@dataclass(frozen=True)
class Known:
    """A gate of this library: a gate of ours under the first `controls` operands, or one of the special cases below."""

    name: str
    controls: int = 0
    parameters: int = 0
    operands: int = 1
    special: str = ""


def _known(name: str, gate: str = "", controls: int = 0, special: str = "") -> Known:
    below, count = CONTROLLED.get(gate or name, (gate or name, controls))
    kind = GATES[below]
    return Known(below, count, kind.parameters, count + kind.targets, special)


_COMMON = ["x", "y", "z", "h", "s", "sdg", "t", "tdg", "sx", "id", "rx", "ry", "rz", "p", "u2", "u3", "swap"]
_COMMON += ["cx", "cy", "cz", "ch", "cswap", "ccx", "crx", "cry", "crz", "cp"]
_BOTH = {name: _known(name) for name in _COMMON}
_BOTH |= {"u1": _known("u1", "p"), "phase": _known("phase", "p"), "cphase": _known("cphase", "cp")}
_BOTH |= {"CX": _known("CX", "cx"), "cu": Known("u3", 1, 4, 2, special="cu")}
_MORE = ["rxx", "ryy", "rzz", "rzx", "sxdg", "iswap", "csx", "cu1", "cu3", "ccz"]

BUILT_IN: dict[int, dict[str, Known]] = {
    2: {"U": _known("U", "u3"), "CX": _known("CX", "cx")},
    3: {"U": Known("u3", 0, 3, 1, special="U"), "gphase": _known("gphase")},
}
FILES: dict[str, dict[str, Known]] = {
    "qelib1.inc": _BOTH
    | {name: _known(name) for name in _MORE}
    | {"u": _known("u", "u3"), "u0": Known("id", 0, 1, 1, special="u0")}
    | {"c3x": _known("c3x", "x", 3), "c4x": _known("c4x", "x", 4), "c3sqrtx": _known("c3sqrtx", "sx", 3)},
    "stdgates.inc": _BOTH | {"u2": Known("u2", 0, 2, 1, special="su2"), "u3": Known("u3", 0, 3, 1, special="su2")},
}
# Gates of those files that are no gate of ours: defined as the files do.
DEFINED: dict[str, str] = {
    "qelib1.inc": """
gate rccx a, b, c { h c; t c; cx b, c; tdg c; cx a, c; t c; cx b, c; tdg c; h c; }
gate rc3x a, b, c, d {
  h d; t d; cx c, d; tdg d; h d;
  cx a, d; t d; cx b, d; tdg d; cx a, d; t d; cx b, d; tdg d;
  h d; t d; cx c, d; tdg d; h d;
}
"""
}


def operations(known: Known, angles: Sequence[Affine], wires: Sequence[int], exact: bool) -> list[Operation]:
    """The operations of one call. `exact` asks for the global phase too, which matters once the call is controlled."""
    controls = tuple((wire, 1) for wire in wires[: known.controls])
    targets = tuple(wires[known.controls :])
    gate = GATES[known.name]
    if known.special == "u0":
        return [Operation(gate, targets)]
    if known.special == "cu":
        *angles, phase = angles
        return [
            Operation(GATES["p"], (wires[0],), (), (phase,)),
            Operation(gate, targets, controls, tuple(angles)),
        ]
    made = [Operation(gate, targets, controls, tuple(angles))]
    if exact and known.special == "U":  # the built-in U of OpenQASM 3 is exp(i theta/2) u3
        made.append(Operation(GATES["gphase"], (), (), (angles[0] * 0.5,)))
    if exact and known.special == "su2":  # u2 and u3 of stdgates.inc have determinant one
        made.append(Operation(GATES["gphase"], (), (), ((angles[-1] + angles[-2]) * -0.5,)))
    return made


def power(made: list[Operation], exponent: float) -> list[Operation] | None:
    """The operations to a power: integer ones of anything, others of one rotation or phase; else None."""
    if exponent == int(exponent):
        base = made if exponent >= 0 else [each.inverse() for each in reversed(made)]
        return base * abs(int(exponent))
    if len(made) != 1 or not made[0].is_constant:
        return None
    (each,) = made
    name, angle = each.name, each.parameters[0].constant if each.parameters else 0.0
    if name in _PHASES:
        name, angle = "p", math.pi * _PHASES[name]
    if name not in _TURNS:
        return None
    angle = math.remainder(angle, _TURNS[name]) * exponent  # of the principal root
    return [Operation(GATES[name], each.targets, each.controls, (Affine(angle),))]


_PHASES = {"z": 1.0, "s": 0.5, "t": 0.25, "sdg": -0.5, "tdg": -0.25}
_TURNS = dict.fromkeys(("rx", "ry", "rz", "rxx", "ryy", "rzz", "rzx"), 4 * math.pi)
_TURNS |= {"p": 2 * math.pi, "gphase": 2 * math.pi}
