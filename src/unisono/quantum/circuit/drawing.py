"""Drawings of a circuit: as text, and as SVG (one self-contained file, no script, no font to load).

`columns` assigns operations to columns; text and SVG only differ in how they draw a column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from typing import TYPE_CHECKING

from unisono.quantum.circuit.channels import Channel
from unisono.quantum.circuit.gates import PauliRotation
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.parameter import Affine

if TYPE_CHECKING:
    from unisono.quantum.circuit.circuit import Circuit

ROW, BOX, LETTER, GAP, MARGIN = 44, 30, 7.6, 14, 16  # pixels
FILL = {"rotation": "#e3ecfb", "fixed": "#fdf0d8", "array": "#e6f4e6", "marker": "#eeeeee"}
STYLE = (
    "text{font:13px ui-monospace,Menlo,Consolas,monospace;text-anchor:middle;fill:#1b1f24}"
    ".name{text-anchor:end;fill:#59636e}.wire,.link{stroke:#59636e;stroke-width:1.2;fill:none}"
    ".link{stroke:#1b1f24}.box{stroke:#1b1f24;stroke-width:1}.dot{fill:#1b1f24;stroke:#1b1f24;stroke-width:1.2}"
    ".ring{fill:#fff;stroke:#1b1f24;stroke-width:1.2}.bar{stroke:#9aa4ae;stroke-width:4;stroke-dasharray:4 4}"
)


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
    if isinstance(kind, Channel):
        label = kind.label
    label += asked
    if isinstance(kind, PauliRotation):
        pauli_strings = [f"[{pauli}]" for pauli in kind.paulis]
        pauli_strings[0] += angles + asked
        return dict(zip(operation.targets, pauli_strings, strict=True))
    if len(operation.targets) == 1 or name in ("swap", "barrier"):
        return dict.fromkeys(operation.targets, label)
    return {wire: f"{label}:{position}" for position, wire in enumerate(operation.targets)}


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


Bands = list[list[tuple[float, list[Placed]]]]  # columns with their centres, band below band


def bands_of(circuit: Circuit, width: int) -> tuple[float, float, Bands]:
    """Columns in bands of at most about `width` pixels: where wires begin and end, and the bands."""
    head = MARGIN + 8 + LETTER * len(f"q{circuit.wires - 1}")
    bands: Bands = [[]]
    x = widest = head + GAP
    for column in columns(circuit):
        wide = _width(column)
        if bands[-1] and x + wide > width - MARGIN:
            bands.append([])
            x = head + GAP
        bands[-1].append((x + wide / 2, column))
        x += wide + GAP
        widest = max(widest, x)
    return head, widest, bands


def svg(circuit: Circuit, width: int = 1200) -> str:
    """The drawing, wrapped into bands of at most about `width` pixels."""
    head, widest, bands = bands_of(circuit, width)
    height = (circuit.wires - 1) * ROW + BOX
    pitch = height + ROW
    body: list[str] = []
    for number, band in enumerate(bands):
        top = MARGIN + BOX / 2 + number * pitch
        for wire in range(circuit.wires):
            y = top + wire * ROW
            body.append(f'<text class="name" x="{head - 4:.1f}" y="{y + 4.5:.1f}">q{wire}</text>')
            body.append(f'<path class="wire" d="M{head:.1f} {y:.1f}H{widest:.1f}"/>')
        for centre, column in band:
            for placed in column:
                body += _drawn(placed, centre, top)
    size = (widest + MARGIN, MARGIN * 2 + height + (len(bands) - 1) * pitch)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]:.0f}" height="{size[1]:.0f}" '
        f'viewBox="0 0 {size[0]:.0f} {size[1]:.0f}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>' + "".join(body) + "</svg>\n"
    )


def _width(column: list[Placed]) -> float:
    return max(BOX, *(LETTER * len(label) + 12 for each in column for label in each.labels.values()))


def _drawn(placed: Placed, x: float, top: float) -> list[str]:
    operation = placed.operation
    if operation.name == "barrier":
        ends = [(top + wire * ROW - ROW / 2, top + wire * ROW + ROW / 2) for wire in operation.targets]
        return [f'<path class="bar" d="M{x:.1f} {low:.1f}V{high:.1f}"/>' for low, high in ends]
    parts = []
    if placed.bottom > placed.top:
        low, high = top + placed.top * ROW, top + placed.bottom * ROW
        parts.append(f'<path class="link" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
    for wire, value in operation.controls:
        kind = "dot" if value else "ring"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{top + wire * ROW:.1f}" r="4.5"/>')
    for wire, label in placed.labels.items():
        parts += _target(placed, label, x, top + wire * ROW)
    return parts


def _target(placed: Placed, label: str, x: float, y: float) -> list[str]:
    operation = placed.operation
    if label == "X" and operation.controls:
        return [
            f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="10"/>',
            f'<path class="link" d="M{x - 10:.1f} {y:.1f}h20M{x:.1f} {y - 10:.1f}v20"/>',
        ]
    if label == "×":
        return [f'<path class="link" d="M{x - 6:.1f} {y - 6:.1f}l12 12m0 -12l-12 12"/>']
    wide = max(BOX, LETTER * len(label) + 10)
    colour = FILL[family(placed)]
    return [
        f'<rect class="box" x="{x - wide / 2:.1f}" y="{y - BOX / 2:.1f}" width="{wide:.1f}" height="{BOX}" rx="4" '
        f'fill="{colour}"/>',
        f'<text x="{x:.1f}" y="{y + 4.5:.1f}">{escape(label)}</text>',
    ]


def family(placed: Placed) -> str:
    operation = placed.operation
    if not operation.gate.unitary:
        return "marker"
    if operation.name in ("unitary", "diagonal"):
        return "array"
    return "rotation" if operation.parameters else "fixed"
