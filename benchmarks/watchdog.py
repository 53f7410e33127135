"""What the watchdog costs when nothing is wrong: 1 KiB all_reduce with and without it, taking turns in one run.

python benchmarks/watchdog.py [--backends gloo,mpi] [--rounds 61]

All that the watchdog does in a collective is to write it to the operation log; "without" is the same call with a log
that writes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.comm.watchdog.op_log import OpLog

LOOPS = {"gloo": 30, "mpi": 300, "nccl": 100}


class NoLog(OpLog):
    """Writes nothing."""

    __slots__ = ()

    def __init__(self, group: str, ranks: tuple[int, ...]) -> None:
        super().__init__(group, ranks)
        self.append = lambda record: None

    def enter(self, *_: Any) -> None:
        pass


def unwatched(comm: Communicator) -> Communicator:
    """A communicator over the same group that keeps no log."""
    options = {"local_rank": comm.local_rank, "local_size": comm.local_size, "hosts": comm._hosts}
    twin = Communicator(comm.group, comm.backend, comm._watchdog, **options)  # type: ignore[arg-type]
    twin._log = NoLog("none", comm.ranks)
    if twin._fast_path is not None:
        twin._fast_path._log = twin._log
    return twin


def measure(backend: str, rounds: int) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    comm = uni.init(backend)
    contenders = [comm, unwatched(comm)]
    x = torch.ones(256)
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(timed(contenders[which], x))
    uni.shutdown()
    return times[0], times[1]


def timed(comm: Communicator, x: torch.Tensor) -> float:
    for _ in range(10):
        comm.all_reduce(x, "max")
    loops = LOOPS[comm.backend]
    start = time.perf_counter()
    for _ in range(loops):
        comm.all_reduce(x, "max")
    return (time.perf_counter() - start) / loops * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", default="gloo,mpi")
    parser.add_argument("--rounds", type=int, default=61)
    chosen = parser.parse_args()
    for backend in chosen.backends.split(","):
        watched, plain = uni.spawn(measure, 2, backend, (backend, chosen.rounds))[0]
        shares = [100 * (a / b - 1) for a, b in zip(watched, plain, strict=True)]
        low, _, high = statistics.quantiles(shares, n=4)
        print(
            f"{backend}, 2 ranks, 1 KiB all_reduce: {statistics.median(watched):.2f} µs with the watchdog, "
            f"{statistics.median(plain):.2f} µs without: {statistics.median(shares):+.1f}% "
            f"(middle half of {chosen.rounds} rounds: {low:+.1f}% to {high:+.1f}%)"
        )


if __name__ == "__main__":
    main()
