"""What a drawing of a circuit shows, and the drawing in text.

`columns` places the operations; text and SVG only differ in how they draw a column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from unisono.quantum.gates import PauliRotation
from unisono.quantum.operation import Operation
from unisono.quantum.parameter import Affine

if TYPE_CHECKING:
    from unisono.quantum.circuit import Circuit


@dataclass(frozen=True)
class Placed:
    """An operation of a column and the label on each of its targets."""

    operation: Operation
    labels: dict[int, str]

    @property
    def top(self) -> int:
        return min(self._rows)

    @property
    def bottom(self) -> int:
        return max(self._rows)

    @property
    def _rows(self) -> tuple[int, ...]:
        return (*self.operation.wires, *self.labels)


def columns(circuit: Circuit) -> list[list[Placed]]:
    """The operations column by column, each as far left as the rows that it crosses allow."""
    filled = [0] * circuit.wires
    written = [0] * circuit.bits  # the column after a bit's last measurement: what asks for the bit stands right of it
    placed: list[list[Placed]] = []
    for operation in circuit.operations:
        each = Placed(operation, _labels(operation))
        rows = range(each.top, each.bottom + 1)
        column = max([*(filled[row] for row in rows), *(written[bit] for bit, _ in operation.condition)])
        if column == len(placed):
            placed.append([])
        placed[column].append(each)
        for row in rows:
            filled[row] = column + 1
        for bit in operation.bits:
            written[bit] = column + 1
    return placed


def shown_angle(angle: Affine) -> str:
    """An angle for people: fractions of π where they are simple, else four digits."""
    if not angle.is_constant:
        return str(Affine(float(f"{angle.constant:.4g}"), angle.weights, angle.features))
    share = Fraction(angle.constant / math.pi).limit_denominator(64)
    if share and abs(float(share) * math.pi - angle.constant) < 1e-12:
        top = {1: "", -1: "-"}.get(share.numerator, str(share.numerator))
        return f"{top}π" + (f"/{share.denominator}" if share.denominator > 1 else "")
    return f"{angle.constant:.4g}"


def _labels(operation: Operation) -> dict[int, str]:
    angles = f"({','.join(map(shown_angle, operation.parameters))})" if operation.parameters else ""
    name, kind = operation.name, operation.gate
    held = "".join(f"c{bit}" if value else f"!c{bit}" for bit, value in operation.condition)
    asked = f"?{held}" if held else ""
    if not operation.targets:  # a global phase: drawn on its last control, or on the top wire
        (wire, value) = operation.controls[-1] if operation.controls else (0, 1)
        return {wire: f"{'' if value else '○'}PHASE{angles}{asked}"}
    labels = {"measure": f"M{''.join(map(str, operation.bits))}", "reset": "|0>", "barrier": "░", "swap": "×"}
    label = labels.get(name, f"{name.upper()}{angles}")
    if name.endswith("dg"):
        label = f"{name[:-2].upper()}†"
    label += asked
    if isinstance(kind, PauliRotation):
        words = [f"[{letter}]" for letter in kind.word]
        words[0] += angles + asked
        return dict(zip(operation.targets, words, strict=True))
    if len(operation.targets) == 1 or name in ("swap", "barrier"):
        return dict.fromkeys(operation.targets, label)
    return {wire: f"{label}:{place}" for place, wire in enumerate(operation.targets)}


def text(circuit: Circuit, width: int = 120) -> str:
    """Two lines a wire, wrapped to `width` characters."""
    head = len(str(circuit.wires - 1)) + 2
    names = [f"{f'{row // 2}:':<{head}}" if row % 2 == 0 else " " * head for row in range(2 * circuit.wires - 1)]
    bands: list[list[str]] = []
    lines = list(names)
    for column in columns(circuit):
        drawn = _column(column, circuit.wires)
        if len(lines[0]) + len(drawn[0]) > width and len(lines[0]) > head:
            bands.append(lines)
            lines = list(names)
        lines = [line + cell for line, cell in zip(lines, drawn, strict=True)]
    bands.append([line + ("─" if row % 2 == 0 else "") for row, line in enumerate(lines)])
    return "\n\n".join("\n".join(line.rstrip() for line in band) for band in bands)


def _column(column: list[Placed], wires: int) -> list[str]:
    marks: dict[int, str] = {}
    for each in column:
        bars = each.operation.name == "barrier"
        for row in range(2 * each.top, 2 * each.bottom + 1):
            if not bars or (row + 1) // 2 in each.operation.targets:
                marks[row] = "░" if bars else "│" if row % 2 else "┼"
        marks.update({2 * wire: "●" if value else "○" for wire, value in each.operation.controls})
        marks.update({2 * wire: label for wire, label in each.labels.items()})
    wide = max(map(len, marks.values()))
    lines = []
    for row in range(2 * wires - 1):
        fill = "─" if row % 2 == 0 else " "
        lines.append(fill + marks.get(row, fill).center(wide, fill) + fill)
    return lines
