"""Charts as SVG: lines over steps, stacked bars and the mesh of a plan. The page has their colours.

They are narrow, so that a phone shows all of them with text that can be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, isfinite, log10

from unisono.amounts import format_bytes
from unisono.plan.plan import AXES, Plan

WIDTH, HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 34
HUES = ("#1c7ed6", "#d9480f", "#2f9e44", "#9c36b5", "#e8a200", "#0c8599")
_ROW = 26
_POINTS = 1000  # maximum of a curve, and two


def line_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]], quantity: str, unit: str = "", axis: str = "step"
) -> str:
    """One line for each curve; tooltips show the values of points. Above the vertical axis are quantity and unit."""
    points = [(x, y) for curve in curves.values() for x, y in curve if isfinite(y)]
    if not points:
        return ""
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    if low == high:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    across = (WIDTH - _LEFT - _RIGHT) / max(high_x - low_x, 1e-12)
    down = (HEIGHT - _TOP - _BOTTOM) / (high - low)

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        return round(_LEFT + (x - low_x) * across, 1), round(HEIGHT - _BOTTOM - (y - low) * down, 1)

    title = escape(f"{quantity} ({unit})" if unit else quantity)
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts.append(f'<text class="soft" x="4" y="14">{title}</text>')
    for value in _ticks(low, high):
        y = to_pixels(low_x, value)[1]
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="soft" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.4g}</text>')
    for value in _ticks(low_x, high_x):
        x = to_pixels(value, low)[0]
        parts.append(f'<text class="soft" x="{x}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text class="soft" x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(axis)}</text>')
    for hue, (name, curve) in zip(_hues(len(curves)), curves.items(), strict=True):
        drawn = thinned([(x, y) for x, y in curve if isfinite(y)])
        pixels = [to_pixels(x, y) for x, y in drawn]
        path = " ".join(f"{x},{y}" for x, y in pixels)
        parts.append(f'<polyline fill="none" stroke="{hue}" stroke-width="2" points="{path}"/>')
        for (x, y), (step, value) in zip(pixels, drawn, strict=True):
            title = f"{escape(name)} {value:.6g}{escape(f' {unit}' if unit else '')} at {escape(axis)} {step:g}"
            parts.append(f'<circle cx="{x}" cy="{y}" r="6" fill="{hue}" class="point"><title>{title}</title></circle>')
    return "\n".join([*parts, "</svg>", legend(list(curves))])


def thinned(curve: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Reduce the points of a curve: of each run of neighbours the minimum and the maximum, and the two ends."""
    if len(curve) <= _POINTS:
        return curve
    run = -(-2 * len(curve) // _POINTS)
    kept = {0, len(curve) - 1}
    for first in range(0, len(curve), run):
        indices = range(first, min(first + run, len(curve)))
        kept |= {min(indices, key=lambda at: curve[at][1]), max(indices, key=lambda at: curve[at][1])}
    return [curve[at] for at in sorted(kept)]


def stacked_bars(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Bytes: one bar for each row, stacked by kind, with its sum."""
    if not rows:
        return ""
    kinds = list(dict.fromkeys(kind for parts in rows.values() for kind in parts))
    hues = dict(zip(kinds, _hues(len(kinds)), strict=True))
    most = max(sum(parts.values()) for parts in rows.values()) or 1.0
    margin = 12 + 7 * max(map(len, rows))
    room = WIDTH - margin - 90
    height = _ROW * len(rows) + 8
    drawn = [f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img">']
    for number, (name, parts) in enumerate(rows.items()):
        y, x = 4 + number * _ROW, float(margin)
        drawn.append(f'<text x="{margin - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        for kind, value in parts.items():
            width = room * value / most
            title = f"{escape(name)}: {escape(kind)} {format_bytes(value)}"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" fill="{hues[kind]}">'
                f"<title>{title}</title></rect>"
            )
            x += width
        drawn.append(f'<text class="soft" x="{x + 6:.1f}" y="{y + 16}">{format_bytes(sum(parts.values()))}</text>')
    return "\n".join([*drawn, "</svg>", legend(kinds)])


def legend(names: Sequence[str]) -> str:
    hues = _hues(len(names))
    marks = (f'<span><i style="background:{hue}"></i>{escape(n)}</span>' for hue, n in zip(hues, names, strict=True))
    return f'<div class="legend">{"".join(marks)}</div>'


def _hues(count: int) -> list[str]:
    return [HUES[number % len(HUES)] for number in range(count)]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two, four to nine of them."""
    if high <= low:
        return [low]
    power = 10.0 ** floor(log10((high - low) / 4))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= (high - low) / 4)
    first = -floor(-low / step)
    return [number * step for number in range(first, floor(high / step) + 1)]


_BOX, _GAP, _MAX_RANKS = 84, 8, 256
_RANK_HUES = ("#1c7ed6", "#2f9e44", "#d9480f", "#9c36b5", "#0c8599", "#e8a200", "#c2255c", "#495057")


def mesh_svg(plan: Plan) -> str:
    """The mesh of a plan: rows are indices on the slowest axis, columns the rest, colours indices on the fastest."""
    sizes = dict(zip(AXES, plan.shape, strict=True))
    used = [axis for axis in AXES if sizes[axis] > 1]
    if not used or plan.world > _MAX_RANKS:
        return ""
    rows = sizes[used[0]] if len(used) > 1 else 1
    columns = plan.world // rows
    step = _BOX + _GAP
    width, height = columns * step, rows * step
    parts = [f'<svg class="mesh" viewBox="-1 -1 {width} {height}" width="{min(width, 1100)}">']
    for rank in range(plan.world):
        indices, rest = {}, rank
        for axis in reversed(AXES):
            rest, indices[axis] = divmod(rest, sizes[axis])
        row, column = divmod(rank, columns)
        x, y = column * step, row * step
        labels = [f"{axis} {indices[axis]}" for axis in used]
        hue = _RANK_HUES[indices[used[-1]] % len(_RANK_HUES)]
        parts.append(f"<g><title>rank {rank}: {', '.join(labels)}</title>")
        parts.append(f'<rect x="{x}" y="{y}" width="{_BOX}" height="{_BOX}" rx="8" fill="{hue}" fill-opacity=".16"')
        parts.append(f'stroke="{hue}" stroke-width="2"/>')
        parts.append(f'<text x="{x + _BOX / 2}" y="{y + 24}" text-anchor="middle" font-weight="600">rank {rank}</text>')
        for line, text in enumerate(labels):
            parts.append(
                f'<text class="soft" x="{x + _BOX / 2}" y="{y + 42 + 14 * line}" text-anchor="middle">{text}</text>'
            )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])
