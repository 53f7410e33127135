"""What a schedule will cost, before anything runs.

    print(schedule.describe(torch.complex64))

Time is what the sweeps over memory, the arithmetic and the messages take at given rates, one after the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from unisono.comm.communicator import Communicator
from unisono.quantum.exchange import DEFAULT_CHUNK
from unisono.quantum.memory import local_bytes, shown_bytes
from unisono.quantum.program import Program, Run
from unisono.quantum.schedule import Schedule, tiles

TILE = 12  # axes that a sweep mixes: 64 KiB of complex128, which a core's own cache holds


@dataclass(frozen=True)
class Rates:
    """Of one rank: bytes a second read and written by a sweep, amplitudes a second through one operation, bytes a
    second sent while receiving as many, seconds until a message arrives."""

    memory: float = 10e9
    arithmetic: float = 1.5e9
    link: float = 1e9
    latency: float = 50e-6
    source: str = "stated rates: memory 10 GB/s, 1.5e9 amplitudes/s an operation, link 1 GB/s"

    @classmethod
    def measured(cls, comm: Communicator | None = None, size: int = 32 << 20) -> Rates:
        """Measured in a fraction of a second; every rank calls it. The arithmetic rate is scaled from memory's."""
        data = torch.zeros(size // 4)
        memory = 2 * size / _seconds(lambda: data.mul_(1.5))
        link = cls.link
        if comm is not None and comm.size > 1:
            partner = comm.rank ^ 1
            piece, into = data[: size // 16], torch.empty(size // 16)
            if partner < comm.size:
                link = size / 4 / _seconds(lambda: comm.exchange([(piece, partner)], [(into, partner)]))
            slowest = torch.tensor([memory, link], dtype=torch.float64)
            comm.all_reduce(slowest, op="min")
            memory, link = slowest.tolist()
        arithmetic = memory * (cls.arithmetic / cls.memory)
        text = f"measured: memory {memory / 1e9:.1f} GB/s, link {link / 1e9:.2f} GB/s"
        return cls(memory, arithmetic, link, cls.latency, text)


@dataclass(frozen=True)
class Forecast:
    """Counts of one rank (the busiest of the first and the last), and of the same circuit run in order."""

    schedule: Schedule
    dtype: torch.dtype
    operations: int
    exchanges: int
    sent: int
    sweeps: int
    memory: int
    seconds: float
    in_order_exchanges: int
    in_order_sent: int
    rates: Rates

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        dtype: torch.dtype,
        rates: Rates | None = None,
        tile: int = TILE,
        chunk: int = DEFAULT_CHUNK,
    ) -> Forecast:
        rates = rates or Rates()
        shard = local_bytes(schedule.wires, schedule.held, dtype)
        sweeps, operations = max(_work(schedule, rank, tile) for rank in {0, 2**schedule.held - 1})
        sent = sum(shard - (shard >> len(step.give)) for step in schedule.exchanges)
        messages = sum((1 << len(step.give)) - 1 for step in schedule.exchanges)
        seconds = (
            2 * shard * (sweeps + 2 * len(schedule.exchanges)) / rates.memory
            + operations * (shard / dtype.itemsize) / rates.arithmetic
            + sent / rates.link
            + messages * rates.latency
        )
        return cls(
            schedule,
            dtype,
            operations,
            len(schedule.exchanges),
            sent,
            sweeps,
            shard + (min(chunk, shard) if schedule.held else 0),
            seconds,
            schedule.in_order,
            schedule.in_order * shard // 2,
            rates,
        )

    def __str__(self) -> str:
        ranks = 2**self.schedule.held
        spread = f"{ranks} ranks" if ranks > 1 else "one rank"
        shard = local_bytes(self.schedule.wires, self.schedule.held, self.dtype)
        lines = [
            f"{self.schedule.wires} wires in {str(self.dtype).removeprefix('torch.')} on {spread}, each: "
            f"{self.operations} operations",
            f"exchanges    {self.exchanges} (in order: {self.in_order_exchanges})",
            f"bytes sent   {shown_bytes(self.sent)} (in order: {shown_bytes(self.in_order_sent)})",
            f"sweeps       {self.sweeps} over {shown_bytes(shard)}",
            f"peak memory  {shown_bytes(self.memory)}",
            f"time         about {_shown_seconds(self.seconds)} ({self.rates.source})",
        ]
        return "\n".join(lines)


def _work(schedule: Schedule, rank: int, tile: int) -> tuple[int, int]:
    runs = [step for step in Program.of(schedule, rank).steps if isinstance(step, Run)]
    capacity = max(1, min(tile, schedule.wires - schedule.held))
    return sum(len(tiles(run.operations, capacity)) for run in runs), sum(len(run.operations) for run in runs)


def _shown_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _seconds(action: object) -> float:
    assert callable(action)
    action()
    begin = time.perf_counter()
    action()
    return max(time.perf_counter() - begin, 1e-9)
