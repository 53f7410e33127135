"""Draws the pictures of the documentation into docs/images: `python tools/drawings.py`.

`--check` tells which are not up to date.

Pipelines and meshes are drawn by unisono itself, from the schedules that it runs and the plans that it applies; the
rest is drawn here, a function a picture.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path

from unisono import cli
from unisono.parallel.context.tokens import Tokens
from unisono.plan.plan import Plan
from unisono.plan.schedules.picture import draw_svg
from unisono.plan.schedules.schedule import schedule
from unisono.plan.schedules.timeline import timeline
from unisono.report.charts import mesh_svg

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
HUES = ("#1c7ed6", "#2f9e44", "#d9480f", "#9c36b5")  # of ranks
INK, SOFT, LINE = "#1f2328", "#59636e", "#adb5bd"


class Canvas:
    """An SVG that grows by boxes, words and arrows."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" font-family="system-ui, Helvetica, Arial, sans-serif" font-size="13" fill="{INK}">',
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, hue: str, text: str = "", fill: float = 0.16) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{hue}" fill-opacity="{fill}" '
            f'stroke="{hue}" stroke-width="1.5"/>'
        )
        if text:
            self.words(x + w / 2, y + h / 2 + 4.5, text)

    def words(
        self, x: float, y: float, text: str, soft: bool = False, anchor: str = "middle", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{SOFT if soft else INK}"{weight}>{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, both: bool = False) -> None:
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{SOFT}" stroke-width="1.6" '
            f'marker-end="url(#tip)"{start}/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def data() -> str:
    """Two ranks, the same model, half of the batch each; gradients are summed."""
    c = Canvas(680, 230)
    for rank, y in enumerate((20, 130)):
        hue = HUES[rank]
        c.words(52, y + 44, f"rank {rank}", bold=True)
        c.box(92, y + 15, 124, 50, hue, "half of the batch")
        c.arrow(220, y + 40, 246, y + 40)
        for layer in range(3):
            c.box(250 + 62 * layer, y + 10, 54, 60, hue, f"layer {layer}", fill=0.3)
        c.arrow(438, y + 40, 470, y + 40)
        c.box(474, y + 10, 96, 60, hue, "gradients")
    c.arrow(522, 94, 522, 136, both=True)
    c.words(534, 119, "all-reduce: sum", soft=True, anchor="start")
    c.words(340, 119, "the same parameters, all of them, on every rank", soft=True)
    return c.svg()


def zero() -> str:
    """What each of four ranks holds under stages 0 to 3."""
    c = Canvas(760, 312)
    kinds = ("parameters", "gradients", "optimizer state")
    for column, kind in enumerate(kinds):
        c.words(190 + 200 * column, 28, kind, bold=True)
    for stage in range(4):
        top = 44 + 62 * stage
        c.words(52, top + 31, f"zero={stage}", bold=True)
        for column in range(3):
            sharded = stage >= (3, 2, 1)[column]
            for rank in range(4):
                x = 100 + 200 * column
                c.box(x, top + 12 * rank, 180, 9, LINE, fill=0.08)
                at, width = (x + 45 * rank, 45) if sharded else (x, 180)
                c.box(at, top + 12 * rank, width, 9, HUES[rank], fill=0.75)
    c.words(380, 302, "a row a rank; filled is what it holds (gradients: while microbatches are added up)", soft=True)
    return c.svg()


def tensor() -> str:
    """Two products, the first cut by columns and the second by rows, need one sum."""
    c = Canvas(760, 240)
    for rank, y in enumerate((20, 130)):
        hue = HUES[rank]
        c.words(46, y + 44, f"rank {rank}", bold=True)
        c.box(84, y + 10, 70, 60, LINE, "x", fill=0.2)
        c.arrow(158, y + 40, 186, y + 40)
        c.box(190, y + 10, 50, 60, hue, f"A{rank}", fill=0.35)
        c.words(215, y + 86, "columns", soft=True)
        c.arrow(244, y + 40, 272, y + 40)
        c.box(276, y + 10, 100, 60, hue, f"f(x A{rank})")
        c.arrow(380, y + 40, 408, y + 40)
        c.box(412, y + 22, 70, 36, hue, f"B{rank}", fill=0.35)
        c.words(447, y + 86, "rows", soft=True)
        c.arrow(486, y + 40, 514, y + 40)
        c.box(518, y + 10, 80, 60, hue, "part of y")
        c.arrow(602, y + 40, 660, y + 40)
        c.box(664, y + 10, 60, 60, LINE, "y", fill=0.2)
    c.arrow(558, 94, 558, 136, both=True)
    c.words(570, 119, "all-reduce", soft=True, anchor="start")
    return c.svg()


def sequence() -> str:
    """Tokens are sharded between the regions, full within them."""
    c = Canvas(780, 210)
    for rank, y in enumerate((16, 108)):
        hue = HUES[rank]
        c.words(46, y + 40, f"rank {rank}", bold=True)
        c.box(84, y + 16, 130, 40, hue, "norm, my tokens")
        c.arrow(218, y + 36, 296, y + 36)
        c.box(300, y + 6, 200, 60, hue, f"columns A{rank} ... rows B{rank}", fill=0.35)
        c.arrow(504, y + 36, 598, y + 36)
        c.box(602, y + 16, 160, 40, hue, "dropout, my tokens")
    c.words(257, 96, "all-gather", soft=True)
    c.words(400, 96, "all tokens", soft=True)
    c.words(551, 96, "reduce-scatter", soft=True)
    c.words(390, 200, "an all-gather and a reduce-scatter are the two halves of an all-reduce", soft=True)
    return c.svg()


def context() -> str:
    """Who computes which part of a causal attention: ring in its zigzag order, on four ranks."""
    c = Canvas(730, 330)
    cells, size, ranks = 16, 16, 4
    order = Tokens.zigzag(cells, ranks)
    owner = {int(position): rank for rank in range(ranks) for position in order.positions(rank)}
    for name, left, holder in (
        ("consecutive: rank 3 works most", 40, {position: position // 4 for position in range(cells)}),
        ("zigzag: all work alike", 420, owner),
    ):
        c.words(left + 128, 24, name, bold=True)
        for query in range(cells):
            for key in range(cells):
                seen = key <= query
                hue = HUES[holder[query]] if seen else LINE
                c.parts.append(
                    f'<rect x="{left + size * key}" y="{40 + size * query}" width="{size - 1.5}" height="{size - 1.5}" '
                    f'rx="2" fill="{hue}" fill-opacity="{0.7 if seen else 0.15}"/>'
                )
        c.words(left + 128, 312, "keys", soft=True)
        c.parts.append(
            f'<text x="{left - 10}" y="168" text-anchor="middle" fill="{SOFT}" '
            f'transform="rotate(-90 {left - 10} 168)">queries</text>'
        )
    for rank in range(ranks):
        c.box(322, 110 + 34 * rank, 60, 24, HUES[rank], f"rank {rank}", fill=0.35)
    return c.svg()


def expert() -> str:
    """Tokens travel to the rank that owns their expert, and back."""
    c = Canvas(780, 240)
    for rank, y in enumerate((20, 130)):
        hue = HUES[rank]
        c.words(46, y + 44, f"rank {rank}", bold=True)
        c.box(84, y + 15, 90, 50, hue, "my tokens")
        c.arrow(178, y + 40, 206, y + 40)
        c.box(210, y + 15, 70, 50, hue, "router")
        for number in range(2):
            c.box(400, y + 4 + 38 * number, 110, 32, hue, f"expert {2 * rank + number}", fill=0.35)
        c.arrow(284, y + 40, 396, y + 40)
        c.arrow(514, y + 40, 620, y + 40)
        c.box(624, y + 15, 130, 50, hue, "my tokens, mixed")
    c.arrow(284, 70, 396, 158)
    c.arrow(284, 162, 396, 74)
    c.arrow(514, 70, 620, 158)
    c.arrow(514, 162, 620, 74)
    c.words(340, 226, "all-to-all", soft=True)
    c.words(567, 226, "all-to-all", soft=True)
    return c.svg()


def recompute() -> str:
    """What is kept between the forward and the backward of four blocks."""
    c = Canvas(760, 356)
    kept = {"none": "11111", "selective": "10110", "attention": "11101", "full": "10000"}
    names = ("input", "norm", "q k v", "scores", "gelu")
    for row, (word, which) in enumerate(kept.items()):
        top = 40 + 76 * row
        c.words(12, top + 26, word, bold=True, anchor="start")
        for block in range(3):
            left = 96 + 220 * block
            c.parts.append(
                f'<rect x="{left}" y="{top - 8}" width="212" height="56" rx="6" fill="none" stroke="{LINE}"/>'
            )
            for position, is_kept in enumerate(map(int, which)):
                c.box(
                    left + 8 + 40 * position, top + 2, 34, 36, HUES[0 if is_kept else 2], fill=0.75 if is_kept else 0.06
                )
    for position, name in enumerate(names):
        c.parts.append(
            f'<text x="{121 + 40 * position}" y="24" text-anchor="middle" font-size="10" fill="{SOFT}">{name}</text>'
        )
    c.words(428, 340, "filled: kept for the backward; empty: computed again in it", soft=True)
    return c.svg()


def mesh(plan: str) -> str:
    """unisono's own picture of a plan's mesh, with the colours that its report would give it."""
    drawn = mesh_svg(Plan.parse(plan)).replace(
        '<svg class="mesh"',
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="system-ui, Helvetica, Arial, sans-serif" font-size="13" '
        f'fill="{INK}"',
    )
    return drawn.replace('class="soft"', f'font-size="11" fill="{SOFT}"') + "\n"


def pipeline(name: str, ranks: int = 4, microbatches: int = 8) -> str:
    """unisono's own picture of a schedule."""
    return draw_svg(timeline(schedule(name, ranks, microbatches)), width=1000)


def program() -> str:
    """What `unisono explain examples/quickstart.py:quickstart --mesh dp=2,mp=4,full --svg FILE` draws."""
    task = f"{ROOT / 'examples' / 'quickstart.py'}:quickstart"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "program.svg"
        cli.main(["explain", task, "--mesh", "dp=2,mp=4,full", "--svg", str(file)])
        return file.read_text(encoding="utf-8")


PICTURES: dict[str, Callable[[], str]] = {
    "data": data,
    "zero": zero,
    "tensor": tensor,
    "sequence": sequence,
    "context": context,
    "expert": expert,
    "recompute": recompute,
    "hybrid": lambda: mesh("dp=2,tp=2,pp=2"),
    "program": program,
    "pipeline-f-then-b": lambda: pipeline("f-then-b"),
    "pipeline-1f1b": lambda: pipeline("1f1b"),
    "pipeline-interleaved": lambda: pipeline("interleaved"),
    "pipeline-zb1p": lambda: pipeline("zb1p"),
}


def stale() -> dict[str, str]:
    """The pictures, by name, of which docs/images has none or another."""
    drawn = {name: draw() for name, draw in PICTURES.items()}
    return {name: picture for name, picture in drawn.items() if _read(name) != picture}


def main() -> int:
    IMAGES.mkdir(parents=True, exist_ok=True)
    found = stale()
    if "--check" in sys.argv:
        print(f"not up to date: {', '.join(found)}; run python tools/drawings.py" if found else "drawings: up to date")
        return int(bool(found))
    for name, picture in found.items():
        (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(f"drew docs/images/{name}.svg")
    return 0


def _read(name: str) -> str:
    file = IMAGES / f"{name}.svg"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
