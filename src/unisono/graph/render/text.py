"""A program as text: the serial program on the left, what a rank does on the right, collectives with their ranks."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.graph.render.listing import Account, Line, Talk
from unisono.graph.render.sizes import size_text

_WIDEST = 64  # columns of the serial side


def as_text(told: Account, title: str = "program") -> str:
    """What `print(program)` shows."""
    return "\n".join([*_head(told, title), "", *_given(told), "", *_body(told), "", *_foot(told)])


def place_text(told: Account) -> str:
    coordinate = told.mesh.coordinate(told.rank)
    places = ", ".join(f"{name}={place}" for name, place in zip(told.mesh.names, coordinate, strict=True))
    return f"rank {told.rank} of {told.mesh.ranks.size}, at {places}"


def total_text(talks: list[Talk]) -> str:
    kinds: dict[str, int] = {}
    for talk in talks:
        kinds[talk.kind] = kinds.get(talk.kind, 0) + 1
    if not kinds:
        return "no collectives"
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{listed}; {size_text(sum(talk.received for talk in talks))} received"


def _head(told: Account, title: str) -> Iterator[str]:
    yield f"{title} on {told.mesh}: {place_text(told)}"
    yield f"  forward:  {total_text(told.forward)}"
    yield f"  backward: {total_text(told.backward)}"
    yield from [f"  update:   {total_text(told.updates)}"] if told.updates else []
    yield from (f"  {words}" for words in told.about)
    yield "  placements, one an axis: S0 sharded along dim 0, R replicated, P parts of a sum"


def _given(told: Account) -> Iterator[str]:
    rows = [(each.kind, each.name, each.whole, each.local, each.placements, each.strategy) for each in told.given]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(6)]
    for row, each in zip(rows, told.given, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        summed = f"  gradient summed over {', '.join(each.summed)}" if each.summed else ""
        summed += f"  {each.kept}" if each.kept else ""
        yield (cells + summed + (f"  note: {each.note}" if each.note else "")).rstrip()


def _body(told: Account) -> Iterator[str]:
    left = [text for line in told.lines for text in (line.serial, "  " + line.serial_shapes)]
    width = min(max(map(len, left), default=0), _WIDEST)
    yield f"{'serial'.ljust(width)} | rank {told.rank}"
    yield f"{'-' * width}-+-{'-' * 60}"
    for line in told.lines:
        yield from _both(line, width)
    if told.outputs:
        yield f"{' ' * width} | return {', '.join(told.outputs)}"


def _both(line: Line, width: int) -> Iterator[str]:
    margin = f"{' ' * width} |"
    if line.serial:
        where = "  ".join(word for word in (line.path, line.source) if word)
        instead = f"   as {line.local}" if line.local else ""
        yield f"{line.serial.ljust(width)} | {line.distributed}   strategy {line.strategy}{instead}"
        yield f"{('  ' + line.serial_shapes).ljust(width)} |   {line.local_shapes}   {line.placements}"
        yield from [f"{margin}   # {where}"] if where else []
        yield from [f"{margin}   note: {line.note}"] if line.note else []
    else:
        yield f"{margin} {line.distributed}   {line.local_shapes}   {line.placements}".rstrip()
    for direction, talks in (("forward", line.forward), ("backward", line.backward)):
        for talk in talks:
            yield f"{margin}     {direction}: {talk_text(talk)}"


def talk_text(talk: Talk) -> str:
    ranks = f"({','.join(map(str, talk.ranks))})"
    shapes = f"{_shape(talk.before)} -> {_shape(talk.after)}"
    size = "" if talk.kind == "send" else f", {size_text(talk.received)}" if talk.is_collective else ", no talk"
    return f"{talk.kind} over {', '.join(talk.axes)} {ranks}: {shapes}{', ' if talk.detail else ''}{talk.detail}{size}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({','.join(map(str, shape))})"


def _foot(told: Account) -> Iterator[str]:
    if told.order:
        yield f"in a step: {told.order}"
    for title, listed in after_texts(told):
        yield title
        for talk in listed:
            ranks = f"({','.join(map(str, talk.ranks))})"
            yield f"  {talk.kind} over {', '.join(talk.axes)} {ranks}: {talk.detail}, {size_text(talk.received)}"


def after_texts(told: Account) -> list[tuple[str, list[Talk]]]:
    """Communication after the ops, by when."""
    when = (("after the backward", told.sums), ("in the update", told.updates))
    return [(title, listed) for title, listed in when if listed]
