"""What a schedule will cost, before anything runs.

    print(schedule.describe(torch.complex64))

Time is what the sweeps over memory, the arithmetic and the messages take at given rates, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from unisono.amounts import format_bytes, format_rate, format_seconds
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.arguments import shown
from unisono.quantum.circuit.templates import hardware_efficient
from unisono.quantum.compile.compiled import sweep_count
from unisono.quantum.distributed.exchange import DEFAULT_CHUNK
from unisono.quantum.distributed.global_index_map import GlobalIndexMap
from unisono.quantum.distributed.local_steps import LocalOperations, local_steps
from unisono.quantum.distributed.memory import local_bytes
from unisono.quantum.kernels.runner import runner

if TYPE_CHECKING:
    from unisono.quantum.schedule.schedule import Schedule

_PROBE = 20  # wires of the state that rates are measured with


@dataclass(frozen=True)
class HostRates:
    """Of one rank: bytes a second read and written by a sweep, amplitudes a second through one operation, bytes a
    second sent while receiving as many, seconds until a message arrives."""

    memory: float = 10e9
    arithmetic: float = 5e9
    link: float = 1e9
    latency: float = 50e-6
    source: str = "stated rates of a core: memory 10 GB/s, 5e9 amplitudes/s an operation; link 1 GB/s"

    @classmethod
    def measured(cls, comm: Communicator | None = None, dtype: torch.dtype = torch.complex64) -> HostRates:
        """Measured in about a second; every rank calls it, and all get the rates of the slowest."""
        local = torch.zeros(1 << _PROBE, dtype=dtype)
        memory = 2 * local.nbytes / _seconds(lambda: local.mul_(1.5))
        circuit = hardware_efficient(_PROBE, 2)
        run = runner(circuit.operations, _PROBE, dtype, local.device, "auto")
        angles = [0.1] * circuit.weights
        arithmetic = len(circuit) * len(local) / _seconds(lambda: run(local, angles, ()))
        link = cls.link
        if comm is not None and comm.size > 1:
            partner, into = comm.rank ^ 1, torch.empty_like(local)
            if partner < comm.size:
                link = local.nbytes / _seconds(lambda: comm.exchange([(local, partner)], [(into, partner)]))
            slowest = torch.tensor([memory, arithmetic, link], dtype=torch.float64)
            comm.all_reduce(slowest, op="min")
            memory, arithmetic, link = slowest.tolist()
        text = f"measured: memory {format_rate(memory)}, {arithmetic:.2g} amplitudes/s, link {format_rate(link)}"
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
    rates: HostRates

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        dtype: torch.dtype,
        rates: HostRates | None = None,
        chunk: int = DEFAULT_CHUNK,
    ) -> Forecast:
        if rates is not None and not isinstance(rates, HostRates):
            raise UsageError(f"rates={shown(rates)}: expected Rates, or None for usual ones")
        rates = rates or HostRates()
        shard = local_bytes(schedule.wires, schedule.global_qubits, dtype)
        sweeps, operations = max(_work(schedule, rank, dtype) for rank in {0, 2**schedule.global_qubits - 1})
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
            shard + (min(chunk, shard) if schedule.global_qubits else 0),
            seconds,
            schedule.in_order,
            schedule.in_order * shard // 2,
            rates,
        )

    def __str__(self) -> str:
        ranks = 2**self.schedule.global_qubits
        shown_ranks = f"{ranks} ranks" if ranks > 1 else "one rank"
        shard = local_bytes(self.schedule.wires, self.schedule.global_qubits, self.dtype)
        lines = [
            f"{self.schedule.wires} wires in {str(self.dtype).removeprefix('torch.')} on {shown_ranks}, each: "
            f"{self.operations} operations",
            f"exchanges    {self.exchanges} (in order: {self.in_order_exchanges})",
            f"bytes sent   {format_bytes(self.sent)} (in order: {format_bytes(self.in_order_sent)})",
            f"sweeps       {self.sweeps} over {format_bytes(shard)}",
            f"peak memory  {format_bytes(self.memory)}",
            f"time         about {format_seconds(self.seconds)} ({self.rates.source})",
        ]
        return "\n".join(lines)


def _work(schedule: Schedule, rank: int, dtype: torch.dtype) -> tuple[int, int]:
    """Sweeps, as the CPU kernel makes them, and operations of a rank."""
    steps = local_steps(schedule.steps, rank, GlobalIndexMap(schedule.global_qubits))
    runs = [step for step in steps if isinstance(step, LocalOperations)]
    axes = schedule.wires - schedule.global_qubits
    return sum(sweep_count(run.operations, axes, dtype) for run in runs), sum(len(run.operations) for run in runs)


def _seconds(action: Callable[[], object]) -> float:
    """The second run's time: the first compiles, and touches memory for the first time."""
    action()
    begin = time.perf_counter()
    action()
    return max(time.perf_counter() - begin, 1e-9)
