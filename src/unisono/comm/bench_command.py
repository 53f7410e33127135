"""`unisono bench comm`: its options, its table and its JSON."""

from __future__ import annotations

import argparse
import json
import platform
from itertools import groupby
from pathlib import Path
from typing import Any

from unisono.amounts import format_bytes, format_rate, format_seconds, parse_amount
from unisono.errors import UsageError, did_you_mean

_BACKENDS = ("gloo", "nccl", "mpi")


def add_kind(kinds: Any) -> None:
    comm = kinds.add_parser("comm", help="every collective, against the raw library in the same run")
    add = comm.add_argument
    add("-n", "-np", dest="n", type=int, default=2, metavar="N", help="ranks (default: 2)")
    add("--backends", default="gloo,mpi", metavar="A,B", help="default: gloo,mpi")
    add("--sizes", default="1K,64K,1M,64M", metavar="S,S", help="bytes; K, M and G are powers of 1024")
    add("--ops", default="", metavar="OP,OP", help="collectives (default: all)")
    add("--rounds", type=int, default=7, metavar="R", help="rounds of each contender (default: 7)")
    add("--json", nargs="?", const="", metavar="FILE", help="print every figure as JSON, or also write them to FILE")
    add("--quiet", action="store_true", help="print only errors: the figures are in the file of --json")
    comm.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    from unisono.comm import bench  # torch is slow to import; bad options should not wait for it

    backends = _words("--backends", chosen.backends, _BACKENDS)
    sizes = [_size(text) for text in chosen.sizes.split(",")]
    ops = _words("--ops", chosen.ops, bench.OPS) if chosen.ops else list(bench.OPS)
    for name in ("n", "rounds"):
        if getattr(chosen, name) < 1:
            raise UsageError(f"{'-n' if name == 'n' else '--rounds'} {getattr(chosen, name)}: expected at least 1")
    if chosen.quiet and not chosen.json:
        raise UsageError("--quiet prints nothing, and no file is named; add --json FILE")
    if chosen.json and not Path(chosen.json).resolve().parent.is_dir():
        raise UsageError(f"--json {chosen.json}: the folder does not exist")
    figures = bench.bench(chosen.n, backends, sizes, ops, chosen.rounds)
    listed = [figure.as_json() for figure in figures]
    text = json.dumps({"machine": _machine(), "rounds": chosen.rounds, "figures": listed}, indent=1)
    if chosen.json == "":
        print(text)
        return 0
    if not chosen.quiet:
        _show(listed)
    if chosen.json:
        try:
            Path(chosen.json).write_text(text + "\n")
        except OSError as error:
            raise UsageError(f"--json {chosen.json}: cannot be written: {error.strerror}") from None
        if not chosen.quiet:
            print(f"wrote {chosen.json}")
    return 0


def _words(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in known:
            near = did_you_mean(word, known)
            raise UsageError(f"{option} {text}: {word!r} is unknown{near}; use some of {', '.join(known)}")
    return words


def _size(text: str) -> int:
    """K, M and G without a B are powers of 1024."""
    word = text.strip().upper().replace("I", "i")
    size = parse_amount(f"{word}iB" if word.endswith(("K", "M", "G")) else word, "", "B")
    if not size or size % 1:
        raise UsageError(f"--sizes: {text!r} is no size; expected numbers such as 512, 1K, 64M")
    return int(size)


def _machine() -> dict[str, Any]:
    import os

    import torch

    return {"cores": os.cpu_count(), "architecture": platform.machine(), "torch": torch.__version__}


def _show(figures: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    for backend, of_backend in groupby(figures, key=lambda figure: figure["backend"]):
        listed = list(of_backend)
        table = Table(title=f"{backend}, {listed[0]['ranks']} ranks", title_justify="left")
        for column in ("collective", "size", "contender", "median", "spread", "algorithm", "bus", "to raw"):
            table.add_column(column, justify="left" if column in ("collective", "contender") else "right")
        for _, of_case in groupby(listed, key=lambda figure: (figure["op"], figure["size"])):
            case = list(of_case)
            raw = next((figure["seconds"] for figure in case if figure["contender"].startswith("raw")), None)
            for figure in case:
                table.add_row(*_row(figure, raw, first=figure is case[0]), end_section=figure is case[-1])
        console.print(table)


def _row(figure: dict[str, Any], raw: float | None, first: bool) -> list[str]:
    is_raw = figure["contender"].startswith("raw")
    return [
        figure["op"] if first else "",
        format_bytes(figure["size"]) if first and figure["size"] else "",
        figure["contender"],
        format_seconds(figure["seconds"]),
        f"{format_seconds(figure['fastest'])} to {format_seconds(figure['slowest'])}",
        format_rate(figure["algorithm_bandwidth"]) if figure["algorithm_bandwidth"] else "",
        format_rate(figure["bus_bandwidth"]) if figure["bus_bandwidth"] else "",
        "" if is_raw or not raw else f"{figure['seconds'] / raw:.2f}x",
    ]
