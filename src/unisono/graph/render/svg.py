"""A program as a picture: values run down lanes from the op that makes them to the last that uses them.

An op is a dot on the lane of its result, with its name and local shapes beside it; a move is a box in the colour of its
collective, forward and backward. Collectives inside an op stand before its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from unisono.amounts import format_bytes, format_ranks
from unisono.graph.render.colours import COLOURS, OTHER, colour_of
from unisono.graph.render.listing import CollectiveStep, ListedOp, Listing
from unisono.graph.render.text import after_texts, rank_text

_ROW, _LANE, _TOP, _LEFT = 26, 16, 84, 20
_MOST_LANES = 24  # values beyond these share the last lane

_STYLE = """
text { font: 12px ui-monospace, monospace; fill: #1a1b1e; } .soft { fill: #6b7078; } .title { font-weight: 600; }
.wire { stroke: #adb5bd; stroke-width: 1.5; fill: none; } .op { fill: #495057; }
.badge { fill: #ffffff; font-weight: 600; }
.paper { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14161a; } text { fill: #e6e7ea; } .soft { fill: #9a9ea6; } .wire { stroke: #50565f; }
  .op { fill: #ced4da; }
}
"""


def as_svg(listing: Listing, title: str = "program") -> str:
    """The drawing as text; it follows the viewer's light or dark colours."""
    lanes = _lanes(listing.lines)
    width = max((len(_label(line)) * 7.4 + _wide(line) for line in listing.lines), default=140) + 260
    text_at = _LEFT + _LANE * (max(lanes.values(), default=0) + 1) + 12
    height = _TOP + _ROW * (len(listing.lines) + len(listing.sums) + len(listing.updates) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{text_at + width:.0f}" height="{height}">',
        f'<style>{_STYLE}</style><rect class="paper" width="100%" height="100%"/>',
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)} on {escape(str(listing.mesh))}</text>',
        f'<text class="soft" x="{_LEFT}" y="40">{escape(rank_text(listing))}</text>',
        *_legend(),
        *_wires(listing.lines, lanes),
        *(part for row, line in enumerate(listing.lines) for part in _mark(line, row, lanes[line.name], text_at)),
        *_sums(listing, text_at),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lanes(lines: list[ListedOp]) -> dict[str, int]:
    """A lane for every value that an instruction makes; free again after its last use."""
    last: dict[str, int] = {}
    for row, line in enumerate(lines):
        for name in line.uses:
            last[name] = row
    lanes: dict[str, int] = {}
    busy: dict[int, int] = {}  # lane -> the row until which it is taken
    for row, line in enumerate(lines):
        lane = next(lane for lane in range(len(busy) + 1) if busy.get(lane, -1) <= row)
        lane = min(lane, _MOST_LANES)
        lanes[line.name] = lane
        busy[lane] = max(busy.get(lane, -1), last.get(line.name, row))
    return lanes


def _y(row: int) -> int:
    return _TOP + _ROW * row


def _x(lane: int) -> int:
    return _LEFT + _LANE * lane


def _wires(lines: list[ListedOp], lanes: dict[str, int]) -> Iterator[str]:
    rows = {line.name: row for row, line in enumerate(lines)}
    for row, line in enumerate(lines):
        for name in dict.fromkeys(line.uses):
            if name in rows:
                x1, y1, x2, y2 = _x(lanes[name]), _y(rows[name]), _x(lanes[line.name]), _y(row)
                bend = max(y2 - _ROW, y1)
                yield f'<path class="wire" d="M{x1} {y1} L{x1} {bend} C{x1} {y2} {x2} {bend} {x2} {y2}"/>'


def _mark(line: ListedOp, row: int, lane: int, text_at: int) -> Iterator[str]:
    x, y = _x(lane), _y(row)
    collectives = [collective for collective in (*line.forward, *line.backward) if collective.is_collective]
    if line.serial:
        yield f'<circle class="op" cx="{x}" cy="{y}" r="4"/>'
    else:
        hue = colour_of(collectives[0].kind) if collectives else OTHER
        yield f'<rect x="{x - 6}" y="{y - 6}" width="12" height="12" rx="3" fill="{hue}"/>'
    at = float(text_at)
    for direction, collective in _badges(line):
        yield from _badge(collective, direction, at, y)
        at += 7.4 * len(direction + collective.kind) + 16
    yield f'<text x="{at:.0f}" y="{y + 4}">{escape(_label(line))}</text>'


def _badges(line: ListedOp) -> list[tuple[str, CollectiveStep]]:
    """Forward and backward; of an op only what is communicated."""
    both = [
        *(("", collective) for collective in line.forward),
        *(("back: ", collective) for collective in line.backward),
    ]
    return [(direction, collective) for direction, collective in both if collective.is_collective or not line.serial]


def _wide(line: ListedOp) -> float:
    """Of an op's badges; those of a move are beside its short label."""
    return (
        sum(7.4 * len(direction + collective.kind) + 16 for direction, collective in _badges(line))
        if line.serial
        else 0.0
    )


def _badge(collective: CollectiveStep, direction: str, at: float, y: int) -> Iterator[str]:
    words = direction + collective.kind
    wide = 7.4 * len(words) + 8
    yield f'<rect x="{at:.0f}" y="{y - 9}" width="{wide:.0f}" height="18" rx="4" fill="{colour_of(collective.kind)}"/>'
    yield f'<text class="badge" x="{at + 4:.0f}" y="{y + 4}">{escape(words)}</text>'


def _label(line: ListedOp) -> str:
    if line.serial:
        return f"{line.distributed}  {line.local_shapes}"
    collectives = [collective for collective in (*line.forward, *line.backward) if collective.is_collective]
    groups = " ".join(dict.fromkeys(f"({format_ranks(collective.ranks)})" for collective in collectives))
    size = format_bytes(sum(collective.received for collective in collectives)) if collectives else "no communication"
    return " ".join(filter(None, (line.local_shapes or line.distributed, line.placements, groups, size)))


def _legend() -> Iterator[str]:
    at = float(_LEFT)
    for kind, hue in COLOURS.items():
        if "_" in kind:
            wide = 7.4 * len(kind) + 8
            yield f'<rect x="{at:.0f}" y="49" width="{wide:.0f}" height="18" rx="4" fill="{hue}"/>'
            yield f'<text class="badge" x="{at + 4:.0f}" y="62">{kind}</text>'
            at += wide + 8


def _sums(listing: Listing, text_at: int) -> Iterator[str]:
    listed = [(f"{title}: ", collective) for title, collectives in after_texts(listing) for collective in collectives]
    for number, (when, collective) in enumerate(listed):
        y = _y(len(listing.lines) + number + 1)
        yield from _badge(collective, when, _LEFT, y)
        at = _LEFT + 7.4 * len(when + collective.kind) + 16
        ranks = f"({format_ranks(collective.ranks)})"
        words = f"over {', '.join(collective.axes)} {ranks} {collective.detail} {format_bytes(collective.received)}"
        yield f'<text x="{at:.0f}" y="{y + 4}">{escape(words)}</text>'
