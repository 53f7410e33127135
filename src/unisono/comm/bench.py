"""How fast ranks communicate: every collective, every size, against the raw library in the same run.

On each backend the contenders take turns: unisono's Communicator, and the library it stands on, called by hand (raw
torch.distributed for gloo and NCCL; raw mpi4py for MPI, and torch.distributed over unisono's MPI backend). A figure is
the median over rounds of the slowest rank's mean time, with the range over rounds as its spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.comm.c10d import all_gather_single, reduce_scatter_single
from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.launch.spawn import spawn

Call = Callable[[], Any]
ROUND = 0.04  # seconds that one contender's round should last


@dataclass(frozen=True)
class Figure:
    """One contender on one collective of one size: seconds, and what they mean as bandwidth."""

    backend: str
    op: str
    size: int  # bytes: of the tensor that is reduced or broadcast, or of the full tensor that is gathered or scattered
    contender: str
    ranks: int
    seconds: float
    fastest: float
    slowest: float
    algorithm_bandwidth: float  # bytes a second: size / seconds
    bus_bandwidth: float  # the same, times the share that has to cross a link: comparable between ranks and collectives

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def bus_factor(op: str, ranks: int) -> float:
    """What part of the size each rank's link has to carry at least."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0


def bench(ranks: int, backends: Sequence[str], sizes: Sequence[int], ops: Sequence[str], rounds: int) -> list[Figure]:
    """Start `ranks` ranks on each backend in turn and measure."""
    figures: list[Figure] = []
    for backend in backends:
        figures += spawn(_measure, ranks, backend, (backend, tuple(sizes), tuple(ops), rounds))[0]
    return figures


def _measure(backend: str, sizes: tuple[int, ...], ops: tuple[str, ...], rounds: int) -> list[Figure]:
    torch.set_num_threads(1)
    comm = world.init(backend)
    figures = []
    for op in ops:
        for size in sizes if op != "barrier" else (0,):
            figures += _alternate(comm, op, size, rounds)
    world.shutdown()
    return figures


def _alternate(comm: Communicator, op: str, size: int, rounds: int) -> list[Figure]:
    count = max(1, size // 4 // comm.size) * comm.size
    # All contenders use the same memory: its address can matter more than who moves it.
    buffers = Buffers(torch.ones(count), torch.ones(count // comm.size), torch.empty(count))
    contenders = {"unisono": _ours(comm, op, buffers)} | _raw(comm, op, buffers)
    loops = {name: _calibrated(comm, call) for name, call in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            times[name].append(_timed(comm, call, loops[name]))
    figures = []
    for name in contenders:
        slowest_rank = torch.tensor(times[name], dtype=torch.float64)
        dist.all_reduce(slowest_rank, dist.ReduceOp.MAX)
        seconds = slowest_rank.tolist()
        median = statistics.median(seconds)
        algorithm = count * 4 / median if op != "barrier" else 0.0
        bus = algorithm * bus_factor(op, comm.size)
        figures.append(
            Figure(comm.backend, op, size, name, comm.size, median, min(seconds), max(seconds), algorithm, bus)
        )
    return figures


def _calibrated(comm: Communicator, call: Call) -> int:
    """How often to repeat a call so that a round lasts long enough to time; the same on every rank."""
    call()
    once = torch.tensor([_timed(comm, call, 3)], dtype=torch.float64)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    return max(1, min(2000, int(ROUND / once.item())))


def _timed(comm: Communicator, call: Call, loops: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - start) / loops


class Buffers(NamedTuple):
    full: torch.Tensor
    part: torch.Tensor
    received: torch.Tensor


def _ours(comm: Communicator, op: str, buffers: Buffers) -> Call:
    full, part, received = buffers
    rows = full.view(comm.size, -1) if comm.rank == 0 else None
    peer = comm.rank ^ 1
    table = received.view(comm.size, -1) if comm.rank == 0 else None
    calls: dict[str, Call] = {
        "all_reduce": lambda: comm.all_reduce(full, "max"),
        "reduce": lambda: comm.reduce(full, 0, "max"),
        "broadcast": lambda: comm.broadcast(full),
        "all_gather": lambda: comm.all_gather_into(received, part),
        "reduce_scatter": lambda: comm.reduce_scatter(full, "max", out=part),
        "all_to_all": lambda: comm.all_to_all(full, out=received),
        "gather": lambda: comm.gather(part, out=table),
        "scatter": lambda: comm.scatter(part, rows),
        "exchange": lambda: comm.exchange([(full, peer)], [(received, peer)]) if peer < comm.size else None,
        "barrier": lambda: comm.barrier(),
    }
    return calls[op]


OPS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "exchange",
    "barrier",
)


def _raw(comm: Communicator, op: str, buffers: Buffers) -> dict[str, Call]:
    through_torch = _raw_torch(comm, op, buffers)
    if comm.backend == "mpi":
        return {"raw mpi4py": _raw_mpi4py(comm, op, buffers), "torch.distributed": through_torch}
    return {f"raw {comm.backend}": through_torch}


def _raw_torch(comm: Communicator, op: str, buffers: Buffers) -> Call:
    full, part, received = buffers
    root = comm.rank == 0
    chunks = list(full.chunk(comm.size)) if root else None
    parts = [torch.empty_like(part) for _ in range(comm.size)] if root else None
    peer, largest = comm.rank ^ 1, dist.ReduceOp.MAX

    def exchange() -> None:
        if peer < comm.size:
            ops = [dist.P2POp(dist.isend, full, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(full, largest),
        "reduce": lambda: dist.reduce(full, 0, largest),
        "broadcast": lambda: dist.broadcast(full, 0),
        "all_gather": lambda: all_gather_single(received, part),
        "reduce_scatter": lambda: reduce_scatter_single(part, full, op=largest),
        "all_to_all": lambda: dist.all_to_all_single(received, full),
        "gather": lambda: dist.gather(part, parts),
        "scatter": lambda: dist.scatter(part, chunks),
        "exchange": exchange,
        "barrier": lambda: dist.barrier(),
    }
    return calls[op]


def _raw_mpi4py(comm: Communicator, op: str, buffers: Buffers) -> Call:
    from mpi4py import MPI

    mpi = MPI.COMM_WORLD
    full, part, received = (tensor.numpy() for tensor in buffers)  # as mpi4py's users have them
    root = comm.rank == 0
    peer = comm.rank ^ 1

    def exchange() -> None:
        if peer < comm.size:
            mpi.Sendrecv(full, peer, recvbuf=received, source=peer)

    calls: dict[str, Call] = {
        "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, full, MPI.MAX),
        "reduce": lambda: mpi.Reduce(MPI.IN_PLACE if root else full, full if root else None, MPI.MAX),
        "broadcast": lambda: mpi.Bcast(full),
        "all_gather": lambda: mpi.Allgather(part, received),
        "reduce_scatter": lambda: mpi.Reduce_scatter_block(full, part, MPI.MAX),
        "all_to_all": lambda: mpi.Alltoall(full, received),
        "gather": lambda: mpi.Gather(part, received if root else None),
        "scatter": lambda: mpi.Scatter(full if root else None, part),
        "exchange": exchange,
        "barrier": lambda: mpi.Barrier(),
    }
    return calls[op]
