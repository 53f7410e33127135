"""The world: all ranks of the job. Joined once by `init`, left by `shutdown`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from unisono.comm import backends
from unisono.comm.communicator import Communicator
from unisono.comm.meeting import Meeting, meet
from unisono.comm.seat import find_seat
from unisono.comm.simulated import SimulatedCommunicator
from unisono.comm.torch_calls import TorchCalls
from unisono.comm.watch import MARGIN, Watch
from unisono.errors import CommError, UsageError
from unisono.launch import environment, turns

DEFAULT_TIMEOUT = 1800.0
JOINING = 30.0  # seconds that a rank which leaves waits for others that are still about to join
_JOINED = "unisono/joined"  # in the store: how many ranks have
LONGEST = 1e9  # seconds, thirty years: what all of torch's clocks can count

_world: Communicator | None = None
_watch: Watch | None = None
_meeting: Meeting | None = None
_torch_calls: TorchCalls | None = None


def init(
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
) -> Communicator:
    """Join the world, whichever way this process was started, and return its communicator.

    backend: gloo, nccl or mpi; by default what the launcher asked for, else nccl with a GPU for every rank, else mpi
    under mpiexec, else gloo. init_method: tcp://HOST:PORT or file:///PATH for processes that were started by hand;
    these need `rank` and `world_size` too. timeout: seconds that a collective may block before the job is stopped
    with a report.
    """
    global _world, _watch, _meeting, _torch_calls
    if _world is not None:
        raise CommError(f"this process has joined already ({_world}); call uni.shutdown() before a second uni.init()")
    if dist.is_initialized():
        raise CommError("torch.distributed is initialised already; let uni.init() do it: its group is torch's default")
    seconds = _seconds(timeout)
    requested = os.environ.get(environment.BACKEND)
    seat = find_seat(init_method, rank, world_size)
    if (backend or requested) not in (None, "auto"):
        backends.choose(backend, requested, seat.how, 1)  # a bad name is an error before anyone waits
    meeting = meet(seat, seconds)
    name = backends.choose(backend, requested, seat.how, meeting.seat.local_size or 1)
    _join(meeting, name, seconds)
    _watch = Watch(meeting.store, seat.rank, seat.size, seconds, os.environ.get(environment.CHECK) == "1")
    assert meeting.seat.local_rank is not None
    assert meeting.seat.local_size is not None
    assert dist.group.WORLD is not None
    _world = _class_for(name)(
        dist.group.WORLD,
        name,
        _watch,
        local_rank=meeting.seat.local_rank,
        local_size=meeting.seat.local_size,
        hosts=meeting.hosts,
    )
    _watch.start(name, meeting.ends_the_store)
    if _watch.check is not None:
        _torch_calls = TorchCalls(_watch)
        _torch_calls.wrap()
    _meeting = meeting
    return _world


def _class_for(backend: str) -> type[Communicator]:
    if backend == "mpi":
        from unisono.comm.mpi_communicator import MPICommunicator

        return MPICommunicator
    return Communicator


def _seconds(timeout: float | timedelta | None) -> float:
    name = environment.TIMEOUT if timeout is None else "timeout"
    given = os.environ.get(environment.TIMEOUT) if timeout is None else timeout
    if given is None:
        return DEFAULT_TIMEOUT
    try:
        seconds = given.total_seconds() if isinstance(given, timedelta) else float(given)
    except (TypeError, ValueError):
        raise UsageError(f"{name}={given!r}: expected a number of seconds") from None
    if not 0 < seconds <= LONGEST:
        raise UsageError(f"{name}={given}: expected a positive number of seconds, {LONGEST:g} at most")
    return seconds


def _join(meeting: Meeting, name: str, seconds: float) -> None:
    """Make torch's default process group."""
    torch_name = name
    if name == "nccl":
        torch.cuda.set_device((meeting.seat.local_rank or 0) % torch.cuda.device_count())
        torch_name = "cpu:gloo,cuda:nccl"
    elif name == "mpi":
        from unisono.comm import mpi

        mpi.register()
        torch_name = mpi.BACKEND
    dist.init_process_group(
        torch_name,
        store=dist.PrefixStore("unisono/torch", meeting.store),
        rank=meeting.seat.rank,
        world_size=meeting.seat.size,
        timeout=timedelta(seconds=seconds + MARGIN),
    )
    if name != "mpi":
        turns.let_gloo_give_way()
    meeting.store.add(_JOINED, 1)


def _await_joins(meeting: Meeting) -> None:
    """gloo connects ranks one after the other: were this one gone before all are done, theirs would fail."""
    deadline = time.monotonic() + JOINING
    with contextlib.suppress(RuntimeError):  # the store may be gone
        while meeting.store.add(_JOINED, 0) < meeting.seat.size and time.monotonic() < deadline:
            time.sleep(0.002)


def shutdown() -> None:
    """Leave the world; `init` may then be called again."""
    global _world, _watch, _meeting, _torch_calls
    if _world is None:
        return
    if _torch_calls is not None:
        _torch_calls.unwrap()
    assert _watch is not None
    assert _meeting is not None
    _watch.stop()
    _await_joins(_meeting)
    dist.destroy_process_group()
    _meeting.close()
    _world = _watch = _meeting = _torch_calls = None


def is_initialized() -> bool:
    return _world is not None


def world() -> Communicator:
    """The world's communicator; CommError before `init`."""
    if _world is None:
        raise CommError("this process has not joined the world yet; call uni.init() first")
    return _world


def rank() -> int:
    """This process's rank; 0 before `init`."""
    return 0 if _world is None else _world.rank


def world_size() -> int:
    """How many ranks there are; 1 before `init`."""
    return 1 if _world is None else _world.size


@contextlib.contextmanager
def simulated(rank: int, size: int) -> Iterator[Communicator]:
    """In the block, this process is one rank of a world whose others are not there.

    Every collective and message is over at once and brings what this rank has, or nothing: shapes, memory and computing
    are those of the rank, numbers are not.
    """
    global _world
    if _world is not None or dist.is_initialized():
        raise CommError("a simulated world needs a process that has not joined one; call uni.shutdown() first")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers torch's "fake" backend

    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    name = "nccl" if torch.cuda.is_available() else "gloo"
    watch = Watch(store, rank, size, DEFAULT_TIMEOUT, False)
    _world = SimulatedCommunicator(dist.group.WORLD, name, watch, local_rank=0, local_size=1, hosts=["here"] * size)
    try:
        yield _world
    finally:
        _world = None
        dist.destroy_process_group()
