"""`unisono bench hardware`: writes a hardware file for this machine."""

from __future__ import annotations

import argparse
from typing import Any

from unisono.errors import UsageError


def add_kind(kinds: Any) -> None:
    parser = kinds.add_parser("hardware", help="measure this machine for the planner")
    add = parser.add_argument
    add("-n", "-np", dest="n", type=int, default=2, metavar="N", help="ranks that share the machine (default: 2)")
    add("--backend", choices=("gloo", "mpi"), help="default: gloo")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    if chosen.n < 1:
        raise UsageError(f"-n {chosen.n}: expected at least 1")
    from unisono.plan.measure import measure

    print(measure(chosen.n, chosen.backend), end="")
    return 0
