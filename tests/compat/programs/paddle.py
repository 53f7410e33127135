"""Document 002: Paddle's programs, whose printed losses and accuracies are those of the document's on one card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compat.programs.texts import Cuts, Row, Size, cut, program_under, run

PADDLE = ("--as", "paddle")
Printed = dict[tuple[int, int], tuple[float, ...]]  # by epoch and batch: loss, acc1, acc5
_LINE = re.compile(r"\[Epoch (\d+), batch (\d+)\] loss: ([\d.]+)(?:, acc1: ([\d.]+), acc5: ([\d.]+))?")


def printed(text: str) -> Printed:
    """The lines that the programs of 002 print."""
    return {
        (int(epoch), int(batch)): tuple(float(value) for value in values if value)
        for epoch, batch, *values in _LINE.findall(text)
    }


TOLERANCE = {"float64": 1e-6, "float32": 1e-4}  # of losses: in float32, steps carry rounding on


def paddle_cuts(epochs: int, batches: int) -> dict[str, str]:
    return {
        "inner_size=102400": "inner_size=64",
        "epoch = 5 ": f"epoch = {epochs} ",
        "batch_num = 100 ": f"batch_num = {batches} ",
        "%.5f": "%.9f",
    }


@dataclass(frozen=True)
class PaddleRow(Row):
    """batch: how many samples one device has in its batch for the same result. has_own_loss: a rank prints the loss of
    its own samples, whose mean over ranks is that of one device."""

    batch: int = 32
    has_own_loss: bool = False


def single_card(batch: int, size: Size, folder: Path) -> Printed:
    """What the document's program for one card prints, with batches of that size."""
    cuts = {**paddle_cuts(size.epochs, size.batches), "batch_size = 32 ": f"batch_size = {batch} "}
    return printed(run(cut(program_under("002", "2.1.1"), cuts), 1, PADDLE, folder, size.dtype)[0])


_references: dict[tuple[int, Size], Printed] = {}


def compare_losses(row: PaddleRow, size: Size, folder: Path) -> str:
    """Every rank against one card; what was found, or an AssertionError."""
    key = (row.batch, size)
    if key not in _references:
        _references[key] = single_card(row.batch, size, folder / "single")
    cuts = {**paddle_cuts(size.epochs, size.batches * row.batch // 32), **row.cuts}
    code = cut(program_under(row.document, row.section), cuts)
    found = [printed(text) for text in run(code, row.ranks, row.options, folder, size.dtype)]
    expected = _references[key]
    assert all(each.keys() == expected.keys() for each in found), f"{row.name}: other lines were printed"
    losses = {round(values[0], 6) for values in expected.values()}
    assert len(losses) > 3, f"{row.name}: the losses of one card do not differ, so they show nothing"
    worst = 0.0
    for at, right in expected.items():
        count = len(found[0][at])
        values = [[each[at][number] for each in found] for number in range(count)]
        if row.has_own_loss:
            values = [[sum(each) / len(each)] for each in values]
        worst = max([worst, *(abs(value - right[number]) for number in range(count) for value in values[number])])
    assert worst <= TOLERANCE[size.dtype], f"{row.name}: off by {worst:.1e} from one card"
    last = expected[max(expected)][0]
    who = "as the mean of the ranks" if row.has_own_loss else "on every rank"
    return f"{len(expected)} lines equal to one card's {who}, off by {worst:.0e}; last loss {last:.6f}"


def _row(section: str, title: str, ranks: int = 2, cuts: Cuts | None = None, edits: int = 0, **own: Any) -> PaddleRow:
    return PaddleRow("002", section, title, compare_losses, ranks, PADDLE, cuts or {}, edits, **own)


def _sharded(level: str, offload: bool = False) -> PaddleRow:
    cuts = {'level="p_g_os", group=group': f'level="{level}", group=group' + ", offload=True" * offload}
    title = f"manual group sharded {level}" + " offload" * offload
    edits = sum(old != new for old, new in cuts.items())
    return _row("2.2.4.1.2", title, batch=64, has_own_loss=True, cuts=cuts, edits=edits)


ROWS = [
    _row("2.1.1", "one card, dynamic", 1),
    _row("2.1.2", "one card, static", 1),
    _row("2.2.4.1.1", "manual DP", batch=64, has_own_loss=True),
    _sharded("os"),
    _sharded("os_g"),
    _sharded("p_g_os"),
    _sharded("p_g_os", offload=True),
    _row("2.2.4.1.3", "manual MP"),
    _row("2.2.4.1.4", "manual PP"),
    _row("2.2.4.2.1", "marks DP"),
    _row("2.2.4.2.2", "marks MP"),
    _row("2.2.4.2.3", "marks PP"),
    _row("2.2.4.2.5", "to_static DP"),
    _row("2.2.4.2.6", "to_static MP"),
    _row("2.2.4.2.7", "to_static PP"),
    _row("2.2.4.3.1", "Engine DP"),
    _row("2.2.4.3.2", "Engine group sharded"),
    _row("2.2.4.3.3", "Engine MP"),
    _row("2.2.4.3.4", "Engine PP"),
]
