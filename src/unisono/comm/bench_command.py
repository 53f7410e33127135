"""`unisono bench comm`: its options, its table and its JSON."""

from __future__ import annotations

import argparse
import json
import platform
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from unisono.errors import UsageError, did_you_mean

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
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
    comm.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    from unisono.comm import bench  # torch is slow to import; bad options should not wait for it

    backends = _words("--backends", chosen.backends, _BACKENDS)
    sizes = [_size(text) for text in chosen.sizes.split(",")]
    ops = _words("--ops", chosen.ops, bench.OPS) if chosen.ops else list(bench.OPS)
    for name in ("n", "rounds"):
        if getattr(chosen, name) < 1:
            raise UsageError(f"{'-n' if name == 'n' else '--rounds'} {getattr(chosen, name)}: expected at least 1")
    if chosen.json and not Path(chosen.json).resolve().parent.is_dir():
        raise UsageError(f"--json {chosen.json}: the folder does not exist")
    figures = bench.bench(chosen.n, backends, sizes, ops, chosen.rounds)
    listed = [figure.as_json() for figure in figures]
    text = json.dumps({"machine": _machine(), "rounds": chosen.rounds, "figures": listed}, indent=1)
    if chosen.json == "":
        print(text)
        return 0
    _show(listed)
    if chosen.json:
        try:
            Path(chosen.json).write_text(text + "\n")
        except OSError as error:
            raise UsageError(f"--json {chosen.json}: cannot be written: {error.strerror}") from None
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
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"--sizes: {text!r} is no size; expected numbers such as 512, 1K, 64M")
    return int(match[1]) * _UNITS[match[2].upper()]


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
        _shown_size(figure["size"]) if first and figure["size"] else "",
        figure["contender"],
        _shown_time(figure["seconds"]),
        _shown_range(figure["fastest"], figure["slowest"]),
        _shown_rate(figure["algorithm_bandwidth"]),
        _shown_rate(figure["bus_bandwidth"]),
        "" if is_raw or not raw else f"{figure['seconds'] / raw:.2f}x",
    ]


def _shown_size(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def _shown_time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _shown_range(low: float, high: float) -> str:
    return f"{low * 1e6:.1f}-{high * 1e6:.1f} µs" if high < 1e-3 else f"{low * 1e3:.2f}-{high * 1e3:.2f} ms"


def _shown_rate(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate else ""
