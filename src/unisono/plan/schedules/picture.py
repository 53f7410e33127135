"""Pictures of a timeline: a row a rank, a box an action, gaps where a rank waits.

A box shows the microbatch; where a rank holds several stages, letters tell them apart (a: its first stage, b: its
second). Text also names the kind of action; SVG and coloured text show it by colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import floor, log10
from string import ascii_lowercase

from unisono.plan.schedules.action import Action, Kind
from unisono.plan.schedules.activations import peak
from unisono.plan.schedules.timeline import Span, Timeline

WORDS: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
FILLS: dict[Kind, str] = {"F": "#3b6fb6", "B": "#2f8f5b", "I": "#3fa98c", "W": "#c77f2a"}
_ANSI: dict[Kind, int] = {"F": 44, "B": 42, "I": 46, "W": 43}  # terminal backgrounds
GAP = "·"


def summary(timeline: Timeline, unit: str = "") -> str:
    """One line: the schedule, its size, its length, its bubble, and the most activations that a rank keeps."""
    schedule = timeline.schedule
    chunks = f" × {schedule.chunks} stages" if schedule.chunks > 1 else ""
    bubble = f"bubble {timeline.bubble_fraction():.1%}"
    if timeline.period < timeline.makespan:
        bubble += f" ({timeline.bubble_fraction(barrier=False):.1%} when steps follow without a barrier)"
    most = max(peak(schedule, rank) for rank in range(schedule.ranks)) / schedule.chunks
    length = f"{timeline.makespan:.4g} {unit}" if unit else f"{timeline.makespan:g}"
    return (
        f"{schedule.name}: {_count(schedule.ranks, 'rank')}{chunks}, {_count(schedule.microbatches, 'microbatch')}, "
        f"length {length}, {bubble}, at most {_count(most, 'microbatch')} kept"
    )


def _count(number: float, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:g} {noun}{'' if number == 1 else plural}"


def draw_text(timeline: Timeline, width: int = 240, colour: bool = False) -> str:
    """The timeline in characters, as wide as its labels need but at most about `width`; colours by terminal codes."""
    labels = _Labels(timeline)
    scale = min(_columns_per_time(timeline, labels), width / timeline.makespan)
    margin = len(f"rank {timeline.schedule.ranks - 1}")
    lines = [summary(timeline)]
    for rank, spans in enumerate(timeline.spans):
        row = "".join(_cells(spans, scale, round(timeline.makespan * scale), labels, colour))
        lines.append(f"{f'rank {rank}':<{margin}} {row}")
    return "\n".join(lines)


class _Labels:
    """What boxes say."""

    def __init__(self, timeline: Timeline) -> None:
        schedule = timeline.schedule
        self.letters = {}
        for rank in range(schedule.ranks):
            for chunk, stage in enumerate(schedule.stages_of(rank)):
                self.letters[stage] = ascii_lowercase[chunk % 26] if schedule.chunks > 1 else ""

    def short(self, action: Action) -> str:
        return f"{action.microbatch}{self.letters[action.stage]}"

    def long(self, action: Action) -> str:
        return f"{action.kind}{self.short(action)}"


def _columns_per_time(timeline: Timeline, labels: _Labels) -> float:
    """So many that every label fits its box with a space after it."""
    boxes = ((len(labels.long(s.action)) + 1, s.end - s.start) for spans in timeline.spans for s in spans)
    return max(columns / time for columns, time in boxes if time > 0)


def _cells(spans: tuple[Span, ...], scale: float, columns: int, labels: _Labels, colour: bool) -> Iterator[str]:
    column = 0
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        yield GAP * (start - column)
        room = end - start
        text = labels.long(span.action)
        if room <= len(text):  # no space to the next box: say the kind alone, or what fits of it
            text = text if room == len(text) else text[: min(room, 1)]
        box = text.ljust(max(room - 1, 0), "─").ljust(room)
        yield f"\x1b[30;{_ANSI[span.action.kind]}m{box}\x1b[0m" if colour and box else box
        column = end
    yield GAP * (columns - column)


@dataclass(frozen=True)
class _Frame:
    """The measures of an SVG, in pixels."""

    scale: float  # pixels per unit of time
    left: int = 64
    top: int = 64
    row: int = 30
    box: int = 26
    right: int = 96

    def x(self, time: float) -> float:
        return round(self.left + time * self.scale, 2)

    def y(self, rank: int) -> int:
        return self.top + rank * self.row


def draw_svg(timeline: Timeline, width: int = 1200, unit: str = "") -> str:
    """The timeline as one self-contained SVG file, `width` pixels wide. unit: of times; "" where a forward costs 1."""
    margins = _Frame(scale=1)
    frame = _Frame(scale=(width - margins.left - margins.right) / timeline.makespan)
    ranks = timeline.schedule.ranks
    height = frame.y(ranks) + 52
    labels = _Labels(timeline)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" fill="#1f2328">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="14" font-weight="600">{escape(summary(timeline, unit))}</text>',
        f'<text x="{width - frame.right + 8}" y="{frame.top - 8}" fill="#59636e">idle · kept</text>',
        *_legend(timeline, frame),
    ]
    for rank in range(ranks):
        parts += _row(timeline, rank, frame, labels)
    parts += _axis(timeline, frame, unit or "forward = 1")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(timeline: Timeline, frame: _Frame) -> Iterator[str]:
    x = frame.left
    for kind in ("F", *timeline.schedule.backward):
        yield f'<rect x="{x}" y="36" width="14" height="14" rx="2" fill="{FILLS[kind]}"/>'
        yield f'<text x="{x + 20}" y="47">{WORDS[kind]}</text>'
        x += 36 + 7 * len(WORDS[kind])
    yield f'<rect x="{x}" y="36" width="14" height="14" rx="2" fill="#eff1f3" stroke="#d1d9e0"/>'
    yield f'<text x="{x + 20}" y="47">idle</text>'
    if timeline.schedule.chunks > 1:
        yield f'<text x="{x + 64}" y="47" fill="#59636e">a, b, …: the rank’s first stage (dark), its second, …</text>'


def _row(timeline: Timeline, rank: int, frame: _Frame, labels: _Labels) -> Iterator[str]:
    schedule, y = timeline.schedule, frame.y(rank)
    middle = y + frame.box / 2 + 4
    end = frame.x(timeline.makespan)
    yield f'<text x="12" y="{middle}">rank {rank}</text>'
    yield f'<rect x="{frame.left}" y="{y}" width="{round(end - frame.left, 2)}" height="{frame.box}" fill="#eff1f3"/>'
    chunk = {stage: number for number, stage in enumerate(schedule.stages_of(rank))}
    for span in timeline.spans[rank]:
        yield from _box(span, 1 - 0.45 * chunk[span.action.stage] / max(1, schedule.chunks - 1), y, frame, labels)
    kept = peak(schedule, rank) / schedule.chunks
    yield f'<text x="{end + 8}" y="{middle}">{timeline.bubble_fraction(rank):.0%} · {kept:g}</text>'


def _box(span: Span, opacity: float, y: int, frame: _Frame, labels: _Labels) -> Iterator[str]:
    action, x = span.action, frame.x(span.start)
    width = round(frame.x(span.end) - x, 2)
    ink = "#ffffff" if opacity > 0.8 else "#1f2328"
    words = (
        f"{WORDS[action.kind]}: stage {action.stage}, microbatch {action.microbatch}, {span.start:g} to {span.end:g}"
    )
    yield (
        f'<rect x="{x}" y="{y}" width="{width}" height="{frame.box}" rx="2" fill="{FILLS[action.kind]}" '
        f'fill-opacity="{opacity:.2f}" stroke="#ffffff"><title>{words}</title></rect>'
    )
    text = labels.short(action)
    if width >= 7 * len(text) + 3:  # the widest a digit gets, and the border
        yield (
            f'<text x="{round(x + width / 2, 2)}" y="{y + frame.box / 2 + 4}" text-anchor="middle" fill="{ink}" '
            f'pointer-events="none">{text}</text>'
        )


def _axis(timeline: Timeline, frame: _Frame, unit: str) -> Iterator[str]:
    y = frame.y(timeline.schedule.ranks) + 4
    step = _tick_step(timeline.makespan)
    for tick in range(int(timeline.makespan / step) + 1):
        time = tick * step
        x = frame.x(time)
        yield f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + 5}" stroke="#8c959f"/>'
        yield f'<text x="{x}" y="{y + 19}" text-anchor="middle" fill="#59636e">{time:.6g}</text>'
    yield f'<text x="{frame.left}" y="{y + 38}" fill="#59636e">time ({escape(unit)})</text>'


def _tick_step(length: float) -> float:
    """1, 2 or 5 times a power of ten, such that there are 7 to 18 steps."""
    power = 10 ** floor(log10(length / 7))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= length / 7)
