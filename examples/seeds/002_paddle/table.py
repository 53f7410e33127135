"""All programs of this folder against one device: one table, with the worst deviation of losses and parameters.

python examples/seeds/002_paddle/table.py
python examples/seeds/002_paddle/table.py --full

It starts the ranks itself. In float64, where what is not rounding shows; with `--full` at the document's width, in
float32. Less of it: `--batches 1`, and `--ways static` for the programs whose names have that word.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import unisono as uni

sys.path.insert(0, str(Path(__file__).resolve().parent))
from simple_net import Outcome, Size

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Way:
    section: str
    title: str
    file: str
    ranks: int = 2
    stage: int | None = None

    def train(self, size: Size) -> Outcome:
        module: Any = importlib.import_module(self.file)
        outcome: Outcome = module.train(size) if self.stage is None else module.train(size, self.stage)
        return outcome


def _group_sharded(section: str, title: str, file: str) -> list[Way]:
    return [Way(section, f"{title} stage {stage}", file, stage=stage) for stage in STAGES]


WAYS = [
    Way("2.1.1", "one device", "single", 1),
    Way("2.1.2", "one device, program", "single_static", 1),
    Way("2.2.4.1.1", "manual DP", "manual_dp"),
    *_group_sharded("2.2.4.1.2", "manual group sharded", "manual_group_sharded"),
    Way("2.2.4.1.3", "manual MP", "manual_mp"),
    Way("2.2.4.1.4", "manual PP", "manual_pp"),
    Way("2.2.4.2.1", "marks DP", "semi_dp"),
    Way("2.2.4.2.2", "marks MP", "semi_mp"),
    Way("2.2.4.2.3", "marks PP", "semi_pp"),
    *_group_sharded("2.2.4.2.4", "marks group sharded", "semi_group_sharded"),
    Way("2.2.4.2.5", "to_static DP", "static_dp"),
    Way("2.2.4.2.6", "to_static MP", "static_mp"),
    Way("2.2.4.2.7", "to_static PP", "static_pp"),
    *_group_sharded("2.2.4.2.8", "to_static group sharded", "static_group_sharded"),
    Way("2.2.4.3.1", "Engine DP", "engine_dp"),
    *_group_sharded("2.2.4.3.2", "Engine group sharded", "engine_group_sharded"),
    Way("2.2.4.3.3", "Engine MP", "engine_mp"),
    Way("2.2.4.3.4", "Engine PP", "engine_pp"),
    Way("2.2.2", "Engine, automatic", "engine_auto"),
]


@dataclass(frozen=True)
class Row:
    way: Way
    plan: str
    losses: list[float]
    loss: float  # the worst deviation of a loss, beside the loss
    parameters: float  # the worst deviation of a parameter, beside the largest of its tensor


def rows(size: Size, ways: list[Way]) -> list[Row]:
    """Ways of equally many ranks, one after the other, on this rank; each against one device."""
    expected = WAYS[0].train(size)
    found = []
    for way in ways:
        found.append(_row(way, way.train(size), expected))
        gc.collect()  # trainers hold models in cycles
    return found


def _row(way: Way, outcome: Outcome, expected: Outcome) -> Row:
    pairs = zip(outcome.losses, expected.losses, strict=True)
    loss = max(abs(found - right) / abs(right) for found, right in pairs)
    assert outcome.parameters.keys() == expected.parameters.keys(), f"{way.title}: {list(outcome.parameters)}"
    parameters = max(
        float((outcome.parameters[name] - right).abs().max() / right.abs().max())
        for name, right in expected.parameters.items()
    )
    return Row(way, outcome.plan, outcome.losses, loss, parameters)


def text(found: list[Row]) -> str:
    titles = ("section", "way", "plan", "ranks", "losses", "loss off by", "parameters")
    cells = [
        (
            row.way.section,
            row.way.title,
            row.plan,
            str(row.way.ranks),
            " ".join(f"{loss:.5f}" for loss in row.losses),
            _deviation(row.loss),
            _deviation(row.parameters),
        )
        for row in found
    ]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (titles, *cells)]
    worst = max(max(row.loss, row.parameters) for row in found)
    return "\n".join([*lines, f"worst deviation from one device: {_deviation(worst)}"])


def _deviation(value: float) -> str:
    return "none" if value == 0 else f"{value:.0e}"


def _on_rank(size: Size, ways: list[Way]) -> list[Row]:
    torch.set_num_threads(1)
    uni.init()
    try:
        return rows(size, ways)
    finally:
        uni.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="the document's width, 102400, in float32")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--ways", default="", metavar="WORD", help="only programs whose names have the word")
    chosen = parser.parse_args()
    ways = [way for way in WAYS if chosen.ways in way.file]
    if not ways:
        parser.error(f"no way has {chosen.ways!r} in its program's name")
    size = Size(dtype=torch.float64, batches=chosen.batches)
    if chosen.full:
        size = Size(inner=102400, batches=chosen.batches)
    found = []
    for ranks in (1, 2):
        here = [way for way in ways if way.ranks == ranks]
        found += uni.spawn(_on_rank, ranks, args=(size, here))[0] if here else []
    print(text(found))
    tolerance = TOLERANCE[size.dtype]
    return 0 if all(row.loss <= tolerance and row.parameters <= tolerance for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
