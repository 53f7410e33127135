"""The world: all ranks of the job. Joined once by `init`, left by `shutdown`."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.comm import backends
from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous.launcher_env import find_rank_info
from unisono.comm.rendezvous.rendezvous import Rendezvous, native_store, rendezvous
from unisono.comm.rendezvous.simulated import SimulatedTransport
from unisono.comm.signatures import torch_objects
from unisono.comm.watchdog.watchdog import MARGIN, Watchdog
from unisono.errors import CommError, UsageError
from unisono.launch import environment, process_threads
from unisono.launch.worker import rank_main
from unisono.torch_patches import PatchSet

JOINING = 30.0  # seconds that a rank which leaves waits for others that are still about to join
_JOINED = "unisono/joined"  # in the store: how many ranks have
LONGEST = 1e9  # seconds, thirty years: what all of torch's clocks can count

_world: Communicator | None = None
_watchdog: Watchdog | None = None
_rendezvous: Rendezvous | None = None
_signed: PatchSet | None = None  # torch's collectives on objects
_inherited: Any = None  # of a rank that was forked from a process in a world: that process's world


def init(
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
) -> Communicator:
    """Join the world, whichever way this process was started.

    Args:
        backend: gloo, nccl or mpi; default: what the launcher asked for, else nccl with a GPU for every rank, else mpi
            under mpiexec, else gloo.
        init_method: tcp://HOST:PORT or file:///PATH for processes that were started by hand; these need `rank` and
            `world_size` too.
        rank: Of this process.
        world_size: How many processes there are.
        timeout: Seconds that a collective may block before the job is stopped with a report.

    Returns:
        The communicator of all ranks.
    """
    global _world, _watchdog, _rendezvous, _signed
    if _world is not None:
        raise CommError(f"this process has joined already ({_world}); call uni.shutdown() before a second uni.init()")
    if dist.is_initialized():
        raise CommError("torch.distributed is initialised already; let uni.init() do it: its group is torch's default")
    seconds = _seconds(timeout)
    requested = os.environ.get(environment.BACKEND)
    info = find_rank_info(init_method, rank, world_size)
    if (backend or requested) not in (None, "auto"):
        backends.choose(backend, requested, info.how, 1)  # a bad name is an error before any rank waits
    met = rendezvous(info, seconds)
    local_rank, local_size = met.info.local_rank, met.info.local_size
    assert local_rank is not None
    assert local_size is not None
    name = backends.choose(backend, requested, info.how, local_size or 1)
    _join(met, name, seconds)
    atexit.register(_leave_at_exit, met)
    _watchdog = Watchdog(met.store, info.rank, info.size, seconds, os.environ.get(environment.CHECK) == "1")
    assert dist.group.WORLD is not None
    _world = Communicator(
        dist.group.WORLD, name, _watchdog, local_rank=local_rank, local_size=local_size, hosts=met.hosts, key=met.key
    )
    _watchdog.start(name, met.ends_the_store or (name == "nccl" and met.info.rank == 0))
    if met.key is not None:
        _signed = torch_objects.signed(met.key)
        _signed.enter()
    _rendezvous = met
    return _world


def _seconds(timeout: float | timedelta | None) -> float:
    name = environment.TIMEOUT if timeout is None else "timeout"
    given = os.environ.get(environment.TIMEOUT) if timeout is None else timeout
    if given is None:
        return environment.DEFAULT_TIMEOUT
    try:
        seconds = given.total_seconds() if isinstance(given, timedelta) else float(given)
    except (TypeError, ValueError):
        raise UsageError(f"{name}={given!r}: expected a number of seconds") from None
    if not 0 < seconds <= LONGEST:
        raise UsageError(f"{name}={given}: expected a positive number of seconds, {LONGEST:g} at most")
    return seconds


def _join(met: Rendezvous, name: str, seconds: float) -> None:
    """Make torch's default process group."""
    torch_name = name
    if name == "nccl":
        from unisono.torch_compat import forked_after_cuda

        if forked_after_cuda():
            raise UsageError(
                "this rank was forked from a process that had initialised CUDA, as torch.cuda.is_available() does "
                "before unisono is imported: import unisono first, or start the program with `unisono run`"
            )
        torch.cuda.set_device((met.info.local_rank or 0) % torch.cuda.device_count())
        torch_name = "cpu:gloo,cuda:nccl"
    elif name == "mpi":
        from unisono.comm.mpi import library

        library.register()
        torch_name = library.BACKEND
    store = native_store(met) if name == "nccl" and met.key is not None else met.store
    with process_threads.gloo_threads_batch_scheduled(name):
        dist.init_process_group(
            torch_name,
            store=dist.PrefixStore("unisono/torch", store),
            rank=met.info.rank,
            world_size=met.info.size,
            timeout=timedelta(seconds=seconds + MARGIN),
        )
    met.store.add(_JOINED, 1)


def _leave_at_exit(met: Rendezvous) -> None:
    _await_joins(met)
    process_threads.await_collectives_threads()


def _await_joins(met: Rendezvous) -> None:
    """gloo connects ranks one after the other: were this one gone before all are done, theirs would fail. A program may
    end at once, without `shutdown`."""
    deadline = time.monotonic() + JOINING
    with contextlib.suppress(RuntimeError):  # the store may be gone
        while met.store.add(_JOINED, 0) < met.info.size and time.monotonic() < deadline:
            time.sleep(0.002)


def shutdown() -> None:
    """Leave the world; `init` may then be called again."""
    global _world, _watchdog, _rendezvous, _signed
    if _world is None:
        return
    assert _watchdog is not None
    assert _rendezvous is not None
    if _signed is not None:
        _signed.leave()
        _signed = None
    _watchdog.stop()
    atexit.unregister(_leave_at_exit)
    _await_joins(_rendezvous)
    dist.destroy_process_group()
    _rendezvous.close()
    _world = _watchdog = _rendezvous = None


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
    """In the block, this process is one rank of a world whose other ranks do not exist.

    Every operation is over at once (see SimulatedTransport): shapes, memory and compute are those of the rank, values
    are not. The world that this process has joined is set aside meanwhile.
    """
    with _set_aside(), _simulated(rank, size) as comm:
        yield comm


@contextlib.contextmanager
def _simulated(rank: int, size: int) -> Iterator[Communicator]:
    global _world
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers torch's "fake" backend

    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    name = "nccl" if torch.cuda.is_available() else "gloo"
    watchdog = Watchdog(store, rank, size, environment.DEFAULT_TIMEOUT, False)
    options = {"local_rank": 0, "local_size": 1, "hosts": ["here"] * size, "make_transport": SimulatedTransport}
    _world = Communicator(dist.group.WORLD, name, watchdog, **options)  # type: ignore[arg-type]
    try:
        yield _world
    finally:
        _world = None
        dist.destroy_process_group()


def _forget_inherited() -> None:
    """In a rank that `uni.spawn` has forked from a process in a world, such as a notebook after `fit`: it is in none.

    The groups are kept, unused: their destructors would wait for threads that the fork has not copied.
    """
    global _watchdog, _rendezvous, _inherited
    if _world is not None:
        _inherited = _set_aside(), _watchdog, _rendezvous
        _inherited[0].__enter__()
        _watchdog = _rendezvous = None


rank_main.at_entry.append(_forget_inherited)


@contextlib.contextmanager
def _set_aside() -> Iterator[None]:
    """In the block neither unisono nor torch knows of a process group; afterwards they know the same ones as before."""
    global _world
    joined, calls = _world, _watchdog.torch_calls if _watchdog is not None and _world is not None else None
    state = distributed_c10d._world
    default, count = state.default_pg, state.group_count
    if default is not None and joined is None:
        raise CommError("torch.distributed was initialised without uni.init(); simulate in another process")
    tables: list[Any] = [
        *(state.pg_map, state.pg_names, state.pg_group_ranks, state.pg_backend_config),
        *(state.pg_to_tag, state.tags_to_pg, state.pg_coalesce_state),
    ]
    known = [dict(table) for table in tables]
    if calls is not None:
        calls.unwrap()  # they would be compared with those of the other ranks
    distributed_c10d._unregister_all_process_groups()
    for table in tables:
        table.clear()
    _world, state.group_count = None, 0
    distributed_c10d._update_default_pg(None)
    try:
        yield
    finally:
        for table, entries in zip(tables, known, strict=True):
            table.update(entries)
        for group, name in state.pg_names.items():
            distributed_c10d._register_process_group(name, group)
        distributed_c10d._update_default_pg(default)
        _world, state.group_count = joined, count
        if calls is not None:
            calls.wrap()
