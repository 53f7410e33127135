"""Drawings of a circuit as figures of matplotlib, laid out as the SVG is."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from unisono.errors import MissingPackageError
from unisono.quantum.circuit.drawing import BOX, FILL, LETTER, MARGIN, ROW, Placed, bands_of, family

if TYPE_CHECKING:
    from unisono.quantum.circuit.circuit import Circuit

_INK, _WIRE = "#1b1f24", "#59636e"
_DPI = 100  # a pixel of the layout is a hundredth of an inch


def figure(circuit: Circuit, width: int = 1200) -> Any:
    """A matplotlib.figure.Figure, which belongs to no window: notebooks show it, and figure.savefig(path) writes it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib", 'draw("mpl")', "draw")
    from matplotlib.figure import Figure

    head, widest, bands = bands_of(circuit, width)
    pitch = (circuit.wires - 1) * ROW + BOX + ROW
    size = (widest + MARGIN, 2 * MARGIN + len(bands) * pitch - ROW)
    made = Figure(figsize=(size[0] / _DPI, size[1] / _DPI), dpi=_DPI)
    axes = made.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
    axes.set_axis_off()
    for number, band in enumerate(bands):
        top = MARGIN + BOX / 2 + number * pitch
        for wire in range(circuit.wires):
            y = top + wire * ROW
            axes.plot([head, widest], [y, y], color=_WIRE, linewidth=0.9, zorder=1)
            axes.text(head - 4, y, f"q{wire}", ha="right", va="center", color=_WIRE, **_FONT)
        for centre, column in band:
            for placed in column:
                _draw(axes, placed, centre, top)
    return made


_FONT: dict[str, Any] = {"family": "monospace", "fontsize": 8.5}


def _draw(axes: Any, placed: Placed, x: float, top: float) -> None:
    operation = placed.operation
    if operation.name == "barrier":
        for wire in operation.targets:
            y = top + wire * ROW
            axes.plot([x, x], [y - ROW / 2, y + ROW / 2], color="#9aa4ae", linewidth=3, linestyle=(0, (1, 1)), zorder=2)
        return
    if placed.bottom > placed.top:
        axes.plot([x, x], [top + placed.top * ROW, top + placed.bottom * ROW], color=_INK, linewidth=0.9, zorder=2)
    for wire, value in operation.controls:
        axes.plot([x], [top + wire * ROW], "o", markersize=6, color=_INK, markerfacecolor=_INK if value else "white")
    for wire, label in placed.labels.items():
        _target(axes, placed, label, x, top + wire * ROW)


def _target(axes: Any, placed: Placed, label: str, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    if label == "X" and placed.operation.controls:
        axes.plot([x], [y], "o", markersize=14, color=_INK, markerfacecolor="white", zorder=3)
        axes.plot([x], [y], "+", markersize=14, color=_INK, zorder=4)
    elif label == "×":
        axes.plot([x], [y], "x", markersize=8, color=_INK, zorder=3)
    else:
        wide = max(BOX, LETTER * len(label) + 10)
        box = FancyBboxPatch(
            (x - wide / 2 + 3, y - BOX / 2 + 3),
            wide - 6,
            BOX - 6,
            boxstyle="round,pad=3,rounding_size=4",
            facecolor=FILL[family(placed)],
            edgecolor=_INK,
            linewidth=0.8,
            zorder=3,
        )
        axes.add_patch(box)
        axes.text(x, y, label, ha="center", va="center", color=_INK, zorder=4, **_FONT)
