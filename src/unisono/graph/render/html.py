"""A program as one HTML file: nothing is loaded from elsewhere, and it reads on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from unisono.amounts import format_bytes, format_ranks
from unisono.graph.render.colours import COLOURS, OTHER, colour_of
from unisono.graph.render.listing import CollectiveStep, ListedInput, ListedOp, Listing
from unisono.graph.render.text import after_texts, rank_text, total_text

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1b1e; --soft: #5c5f66; --paper: #ffffff; --card: #f4f5f7; --rule: #dcdfe4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7ea; --soft: #9a9ea6; --paper: #14161a; --card: #1d2026; --rule: #32363e; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 92rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .4rem; }
code, .code { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.bar { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .6rem; align-items: center;
  padding: .6rem 0; background: var(--paper); border-bottom: 1px solid var(--rule); }
.bar input[type=search] { flex: 1 1 14rem; min-width: 0; padding: .45rem .6rem; font: inherit; color: inherit;
  background: var(--card); border: 1px solid var(--rule); border-radius: 6px; }
.legend span, .collective b { display: inline-block; padding: 0 .45em; border-radius: 4px; color: #fff;
  font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .4rem; font-size: 13px; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; padding: .2rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font: 13px/1.5 ui-monospace, monospace; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; white-space: nowrap; border-bottom: 1px solid var(--rule); }
.heads, .row { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); gap: 0 1rem; }
.heads { font-weight: 600; padding: .3rem 0; }
.row { padding: .4rem .2rem; border-top: 1px solid var(--rule); }
.row.move { background: var(--card); border-left: 4px solid var(--hue); padding-left: .4rem; }
.row.hidden { display: none; }
.collective { font: 13px/1.6 ui-monospace, monospace; overflow-wrap: anywhere; }
@media (max-width: 46rem) {
  .heads { display: none; } .row { grid-template-columns: minmax(0, 1fr); }
  .row.op > div:first-child::before { content: "serial"; display: block; color: var(--soft); font-size: 11px; }
  .row.op > div:last-child::before { content: "this rank"; display: block; color: var(--soft); font-size: 11px; }
  .row.move > div:first-child { display: none; }
}
"""

_SCRIPT = """
const box = document.querySelector('input[type=search]'), only = document.querySelector('#only');
const rows = [...document.querySelectorAll('.row')], count = document.querySelector('#count');
function sift() {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    const hit = words.every(word => row.dataset.text.includes(word))
      && (!only.checked || row.dataset.collectives === '1');
    row.classList.toggle('hidden', !hit);
    shown += hit;
  }
  count.textContent = shown === rows.length ? rows.length + ' lines' : shown + ' of ' + rows.length + ' lines';
}
box.addEventListener('input', sift); only.addEventListener('change', sift); sift();
"""


def as_page(listing: Listing, title: str = "program") -> str:
    """The file as text."""
    return "\n".join(_page(listing, title)) + "\n"


def _page(listing: Listing, title: str) -> Iterator[str]:
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}, rank {listing.rank}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(title)} on {escape(str(listing.mesh))}</h1>"
    yield f'<div class="soft">{escape(rank_text(listing))}</div>'
    yield f"<div>forward: {escape(total_text(listing.forward))}<br>backward: {escape(total_text(listing.backward))}"
    yield f"<br>update: {escape(total_text(listing.updates))}</div>" if listing.updates else "</div>"
    yield from (f'<div class="soft">{escape(words)}</div>' for words in listing.about)
    yield '<div class="bar"><input type="search" placeholder="search: op, module, file, collective, rank" autofocus>'
    yield '<label><input type="checkbox" id="only"> collectives only</label> <span id="count" class="soft"></span>'
    yield '<span class="legend">'
    yield from (f'<span style="background:{hue}">{kind}</span>' for kind, hue in COLOURS.items() if "_" in kind)
    yield "</span></div>"
    yield from _given(listing.given)
    yield f'<div class="heads"><div>serial</div><div>rank {listing.rank}</div></div>'
    for line in listing.lines:
        yield from _row(line)
    if listing.outputs:
        yield f'<div class="code">return {escape(", ".join(listing.outputs))}</div>'
    if listing.order:
        yield f'<p class="soft">in a step: {escape(listing.order)}</p>'
    yield from _sums(listing)
    yield '<p class="soft">Placements, one an axis of the mesh: S0 sharded along dim 0, R replicated, P parts of a sum.'
    yield " Bytes are those that this rank receives.</p>"
    yield f"<script>{_SCRIPT}</script></body></html>"


def _given(given: list[ListedInput]) -> Iterator[str]:
    yield f"<details><summary>{len(given)} parameters, buffers and inputs</summary>"
    titles = ("kind", "name", "full", "local", "placements", "shards", "gradient", "note")
    yield f'<div class="scroll"><table><tr>{"".join(f"<th>{title}" for title in titles)}</tr>'
    for each in given:
        summed = f"summed over {', '.join(each.summed)}" if each.summed else ""
        summed = ", ".join(filter(None, (summed, each.kept)))
        cells = (each.kind, each.name, each.full, each.local, each.placements, each.strategy, summed, each.note)
        yield f"<tr>{''.join(f'<td>{escape(cell)}' for cell in cells)}</tr>"
    yield "</table></div></details>"


def _row(line: ListedOp) -> Iterator[str]:
    collectives = [collective for collective in (*line.forward, *line.backward) if collective.is_collective]
    words = " ".join((line.serial, line.distributed, line.path, line.source, line.local, line.note and "note"))
    words += " ".join(f"{collective.kind} ({format_ranks(collective.ranks, ', ')})" for collective in collectives)
    data = f'data-collectives="{int(bool(collectives))}" data-text="{escape(words.lower(), quote=True)}"'
    if line.serial:
        instead = f' <span class="soft">as {escape(line.local)}</span>' if line.local else ""
        yield f'<div class="row op" {data}><div><code>{escape(line.serial)}</code>'
        yield f'<br><code class="soft">{escape(line.serial_shapes)}</code>'
        where = "  ".join(word for word in (line.path, line.source) if word)
        yield f'<br><span class="soft">{escape(where)}</span></div>'
        yield f"<div><code>{escape(line.distributed)}</code>{instead}"
        yield f"<br><code>{escape(line.local_shapes)}</code> <code>{escape(line.placements)}</code>"
        yield f'<br><code class="soft">strategy {escape(line.strategy)}</code>'
        yield f"<br><b>note:</b> {escape(line.note)}" if line.note else ""
        yield from _collectives(line)
        yield "</div></div>"
        return
    hue = next((colour_of(collective.kind) for collective in (*collectives, *line.forward, *line.backward)), OTHER)
    yield f'<div class="row move" style="--hue:{hue}" {data}><div></div><div><code>{escape(line.distributed)}</code>'
    yield f" <code>{escape(line.local_shapes)}</code> <code>{escape(line.placements)}</code>"
    yield from _collectives(line)
    yield "</div></div>"


def _collectives(line: ListedOp) -> Iterator[str]:
    for direction, steps in (("forward", line.forward), ("backward", line.backward)):
        for collective in steps:
            yield f'<div class="collective">{direction} {_collective(collective)}</div>'


def _collective(collective: CollectiveStep) -> str:
    shapes = f"({','.join(map(str, collective.before))}) → ({','.join(map(str, collective.after))})"
    size = (
        ""
        if collective.kind == "send"
        else format_bytes(collective.received)
        if collective.is_collective
        else "no communication"
    )
    ranks = f"ranks ({format_ranks(collective.ranks)})" if collective.is_collective else ""
    words = " ".join(filter(None, (f"over {', '.join(collective.axes)}", ranks, shapes, collective.detail, size)))
    return f'<b style="background:{colour_of(collective.kind)}">{collective.kind}</b> {escape(words)}'


def _sums(listing: Listing) -> Iterator[str]:
    for title, listed in after_texts(listing):
        yield f"<h1>{title}</h1>"
        for collective in listed:
            ranks = f"ranks ({format_ranks(collective.ranks)})"
            words = escape(
                f"over {', '.join(collective.axes)} {ranks} {collective.detail} {format_bytes(collective.received)}"
            )
            badge = f'<b style="background:{colour_of(collective.kind)}">{collective.kind}</b>'
            yield f'<div class="collective">{badge} {words}</div>'
