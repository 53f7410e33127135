"""What the watch costs when nothing is wrong: 1 KiB all_reduce with and without it, taking turns in one run.

python benchmarks/watch.py [--backends gloo,mpi] [--rounds 41]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import unisono as uni
from unisono.comm.log import Log

LOOPS = 200


class NoLog(Log):
    """Writes nothing down."""

    def enter(self, *_: Any) -> None:
        pass

    def leave(self) -> None:
        pass


def measure(backend: str, rounds: int) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    comm = uni.init(backend)
    logs = {"with": comm._log, "without": NoLog("world", comm.ranks)}
    x = torch.ones(256)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds):
        for name, log in logs.items():
            comm._log = log
            comm.all_reduce(x, "max")
            start = time.perf_counter()
            for _ in range(LOOPS):
                comm.all_reduce(x, "max")
            times[name].append((time.perf_counter() - start) / LOOPS * 1e6)
    uni.shutdown()
    return times["with"], times["without"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", default="gloo,mpi")
    parser.add_argument("--rounds", type=int, default=41)
    chosen = parser.parse_args()
    for backend in chosen.backends.split(","):
        watched, plain = uni.spawn(measure, 2, backend, (backend, chosen.rounds))[0]
        ratios = [a / b for a, b in zip(watched, plain, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"{backend}, 2 ranks, 1 KiB all_reduce: {statistics.median(watched):.2f} µs with the watch, "
            f"{statistics.median(plain):.2f} µs without; ratio {statistics.median(ratios):.3f} "
            f"(middle half of {chosen.rounds} rounds: {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
