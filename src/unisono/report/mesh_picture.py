"""The mesh of a plan, drawn: a box a rank, with its place on every axis that has more than one."""

from __future__ import annotations

from unisono.plan.plan import AXES, Plan

_BOX, _GAP, _MOST = 84, 8, 256
_HUES = ("#1c7ed6", "#2f9e44", "#d9480f", "#9c36b5", "#0c8599", "#e8a200", "#c2255c", "#495057")


def mesh_svg(plan: Plan) -> str:
    """Rows are places on the slowest axis, columns the rest; colour tells the place on the fastest axis."""
    sizes = dict(zip(AXES, plan.shape, strict=True))
    used = [axis for axis in AXES if sizes[axis] > 1]
    if not used or plan.world > _MOST:
        return ""
    rows = sizes[used[0]] if len(used) > 1 else 1
    columns = plan.world // rows
    step = _BOX + _GAP
    width, height = columns * step, rows * step
    parts = [f'<svg class="mesh" viewBox="-1 -1 {width} {height}" width="{min(width, 1100)}">']
    for rank in range(plan.world):
        places, rest = {}, rank
        for axis in reversed(AXES):
            rest, places[axis] = divmod(rest, sizes[axis])
        row, column = divmod(rank, columns)
        x, y = column * step, row * step
        told = [f"{axis} {places[axis]}" for axis in used]
        hue = _HUES[places[used[-1]] % len(_HUES)]
        parts.append(f"<g><title>rank {rank}: {', '.join(told)}</title>")
        parts.append(f'<rect x="{x}" y="{y}" width="{_BOX}" height="{_BOX}" rx="8" fill="{hue}" fill-opacity=".16"')
        parts.append(f'stroke="{hue}" stroke-width="2"/>')
        parts.append(f'<text x="{x + _BOX / 2}" y="{y + 24}" text-anchor="middle" font-weight="600">rank {rank}</text>')
        for line, text in enumerate(told):
            parts.append(
                f'<text class="soft" x="{x + _BOX / 2}" y="{y + 42 + 14 * line}" text-anchor="middle">{text}</text>'
            )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])
