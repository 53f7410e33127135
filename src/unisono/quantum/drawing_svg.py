"""The drawing of a circuit as SVG: one self-contained file, no script, no font to load."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from unisono.quantum.drawing import Placed, columns

if TYPE_CHECKING:
    from unisono.quantum.circuit import Circuit

ROW, BOX, LETTER, GAP, MARGIN = 44, 30, 7.6, 14, 16  # pixels
FILL = {"rotation": "#e3ecfb", "fixed": "#fdf0d8", "array": "#e6f4e6", "marker": "#eeeeee"}
STYLE = (
    "text{font:13px ui-monospace,Menlo,Consolas,monospace;text-anchor:middle;fill:#1b1f24}"
    ".name{text-anchor:end;fill:#59636e}.wire,.link{stroke:#59636e;stroke-width:1.2;fill:none}"
    ".link{stroke:#1b1f24}.box{stroke:#1b1f24;stroke-width:1}.dot{fill:#1b1f24;stroke:#1b1f24;stroke-width:1.2}"
    ".ring{fill:#fff;stroke:#1b1f24;stroke-width:1.2}.bar{stroke:#9aa4ae;stroke-width:4;stroke-dasharray:4 4}"
)


def svg(circuit: Circuit, width: int = 1200) -> str:
    """The drawing, wrapped into bands of at most about `width` pixels."""
    head = MARGIN + 8 + LETTER * len(f"q{circuit.wires - 1}")
    bands: list[list[tuple[float, list[Placed]]]] = [[]]
    x = widest = head + GAP
    for column in columns(circuit):
        wide = _width(column)
        if bands[-1] and x + wide > width - MARGIN:
            bands.append([])
            x = head + GAP
        bands[-1].append((x + wide / 2, column))
        x += wide + GAP
        widest = max(widest, x)
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
    colour = FILL[_family(placed)]
    return [
        f'<rect class="box" x="{x - wide / 2:.1f}" y="{y - BOX / 2:.1f}" width="{wide:.1f}" height="{BOX}" rx="4" '
        f'fill="{colour}"/>',
        f'<text x="{x:.1f}" y="{y + 4.5:.1f}">{escape(label)}</text>',
    ]


def _family(placed: Placed) -> str:
    operation = placed.operation
    if not operation.gate.unitary:
        return "marker"
    if operation.name in ("unitary", "diagonal"):
        return "array"
    return "rotation" if operation.parameters else "fixed"
