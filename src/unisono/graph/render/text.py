"""A program as text: the serial program on the left, what a rank does on the right, collectives with their ranks."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.amounts import format_bytes, format_ranks
from unisono.graph.render.listing import CollectiveStep, ListedOp, Listing

_WIDEST = 64  # columns of the serial side


def as_text(listing: Listing, title: str = "program") -> str:
    """What `print(program)` shows."""
    return "\n".join([*_head(listing, title), "", *_given(listing), "", *_body(listing), "", *_foot(listing)])


def rank_text(listing: Listing) -> str:
    coordinate = listing.mesh.coordinate(listing.rank)
    coordinates = ", ".join(f"{name}={index}" for name, index in zip(listing.mesh.names, coordinate, strict=True))
    return f"rank {listing.rank} of {listing.mesh.ranks.size}, at {coordinates}"


def total_text(collectives: list[CollectiveStep]) -> str:
    kinds: dict[str, int] = {}
    for collective in collectives:
        kinds[collective.kind] = kinds.get(collective.kind, 0) + 1
    if not kinds:
        return "no collectives"
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{listed}; {format_bytes(sum(collective.received for collective in collectives))} received"


def _head(listing: Listing, title: str) -> Iterator[str]:
    yield f"{title} on {listing.mesh}: {rank_text(listing)}"
    yield f"  forward:  {total_text(listing.forward)}"
    yield f"  backward: {total_text(listing.backward)}"
    yield from [f"  update:   {total_text(listing.updates)}"] if listing.updates else []
    yield from (f"  {words}" for words in listing.about)
    yield "  placements, one an axis: S0 sharded along dim 0, R replicated, P parts of a sum"


def _given(listing: Listing) -> Iterator[str]:
    rows = [(each.kind, each.name, each.full, each.local, each.placements, each.strategy) for each in listing.given]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(6)]
    for row, each in zip(rows, listing.given, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        summed = f"  gradient summed over {', '.join(each.summed)}" if each.summed else ""
        summed += f"  {each.kept}" if each.kept else ""
        yield (cells + summed + (f"  note: {each.note}" if each.note else "")).rstrip()


def _body(listing: Listing) -> Iterator[str]:
    left = [text for line in listing.lines for text in (line.serial, "  " + line.serial_shapes)]
    width = min(max(map(len, left), default=0), _WIDEST)
    yield f"{'serial'.ljust(width)} | rank {listing.rank}"
    yield f"{'-' * width}-+-{'-' * 60}"
    for line in listing.lines:
        yield from _both(line, width)
    if listing.outputs:
        yield f"{' ' * width} | return {', '.join(listing.outputs)}"


def _both(line: ListedOp, width: int) -> Iterator[str]:
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
    for direction, collectives in (("forward", line.forward), ("backward", line.backward)):
        for collective in collectives:
            yield f"{margin}     {direction}: {collective_text(collective)}"


def collective_text(collective: CollectiveStep) -> str:
    ranks = f"({format_ranks(collective.ranks)})"
    shapes = f"{_shape(collective.before)} -> {_shape(collective.after)}"
    size = (
        ""
        if collective.kind == "send"
        else f", {format_bytes(collective.received)}"
        if collective.is_collective
        else ", no communication"
    )
    detail = f", {collective.detail}" if collective.detail else ""
    return f"{collective.kind} over {', '.join(collective.axes)} {ranks}: {shapes}{detail}{size}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({','.join(map(str, shape))})"


def _foot(listing: Listing) -> Iterator[str]:
    if listing.order:
        yield f"in a step: {listing.order}"
    for title, listed in after_texts(listing):
        yield title
        for collective in listed:
            ranks = f"({format_ranks(collective.ranks)})"
            size = format_bytes(collective.received)
            yield f"  {collective.kind} over {', '.join(collective.axes)} {ranks}: {collective.detail}, {size}"


def after_texts(listing: Listing) -> list[tuple[str, list[CollectiveStep]]]:
    """Communication after the ops, by when."""
    when = (("after the backward", listing.sums), ("in the update", listing.updates))
    return [(title, listed) for title, listed in when if listed]
