"""The meeting: how the ranks of a world find each other before they can talk.

All ranks reach one key-value store. Each signs in under its rank; when a rank is missing, signed in twice, or comes
from another job (a stale file), the others learn which one and why.

Note: worlds one after the other. A process may leave its world and meet the same others again in the same place. At an
address, rank 0 keeps the store that it opened there and numbers the worlds in it: whoever comes before the next one is
opened finds the last one over, and waits. Where an agent keeps the store, or at a file, each rank counts by itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlparse

import torch.distributed as dist

from unisono.comm import mpi
from unisono.comm import seat as seats
from unisono.comm.seat import Seat
from unisono.errors import CommError, UsageError
from unisono.launch import environment

START = 60.0  # seconds that ranks of a launcher get to come, however short the timeout of collectives
_WORLDS = "unisono/worlds"  # in a store: how many worlds have met there
_OVER = "unisono/over"  # in a world's part of it: some rank has left
PATIENCE = 300.0  # seconds to wait for the other ranks at most, whatever the timeout of collectives

_worlds_left = 0  # by this process
_left_at: dict[str, int] = {}  # worlds that met at a file, by the file's url
_kept: dict[tuple[str, int], dist.Store] = {}  # the stores that this process has opened at an address


@dataclass(frozen=True)
class Meeting:
    store: dist.Store
    seat: Seat  # with local rank and size filled in
    hosts: list[str]  # of every rank

    @property
    def ends_the_store(self) -> bool:
        """Whether the store is gone once this rank is."""
        return self.seat.rank == 0 and self.seat.how not in (seats.ALONE, seats.FILE) and not _is_agents(self.seat)

    def close(self) -> None:
        """The last rank to leave clears away the file through which they met."""
        global _worlds_left
        _worlds_left += 1
        if self.seat.how != seats.FILE:
            with contextlib.suppress(RuntimeError):  # rank 0 may have gone before, and the store with it
                self.store.set(_OVER, "1")
            return
        assert self.seat.url is not None
        closed = self.store.add("unisono/closed", 1)
        path = _path(self.seat)
        _left_at[self.seat.url] = _left_at.get(self.seat.url, 0) + 1
        if closed == self.seat.size:
            path.unlink(missing_ok=True)


def meet(seat: Seat, timeout: float) -> Meeting:
    """Reach the store and wait until every rank has signed in."""
    # Whoever names a place to meet knows when the others come; a launcher may start ranks slowly.
    patience = min(timeout if seat.url else max(timeout, START), PATIENCE)
    store = _open_store(seat, patience)
    signed_in = dist.PrefixStore("unisono/meeting", store)
    _sign_in(signed_in, seat)
    hosts = _wait_for_all(signed_in, seat, patience)
    return Meeting(store, _with_local_rank(seat, hosts), hosts)


def host_name() -> str:
    """This host as the user wrote it to the launcher, else as the machine calls itself."""
    return os.environ.get(environment.HOST) or socket.gethostname()


def _open_store(seat: Seat, patience: float) -> dist.Store:
    if seat.how == seats.ALONE:
        return dist.HashStore()
    if seat.how == seats.FILE:
        return _file_store(seat)
    if seat.how == seats.MPIEXEC:
        return _store_over_mpi(seat, patience)
    host, port = _address(seat)
    if not _is_agents(seat):
        return _world_at(seat, host, port, patience)
    # An agent's store outlives the ranks it restarts, and the worlds that they leave.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}/world_{_worlds_left}", _tcp_store(seat, host, port, False, patience))


def _is_agents(seat: Seat) -> bool:
    """Whether an agent keeps the store for the ranks that it starts."""
    return seat.how == seats.ENVIRONMENT and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _world_at(seat: Seat, host: str, port: int, patience: float) -> dist.Store:
    """The store of the world that meets at this address next. Rank 0 opens it."""
    if seat.rank == 0:
        if (host, port) not in _kept:
            _kept[host, port] = _tcp_store(seat, host, port, True, patience)
        store = _own_part(seat, _kept[host, port])
        return _world_in(store, store.add(_WORLDS, 1))
    deadline = time.monotonic() + patience
    while True:
        left = max(0.1, deadline - time.monotonic())
        store = _own_part(seat, _tcp_store(seat, host, port, False, left))
        try:
            while time.monotonic() < deadline:
                number = store.add(_WORLDS, 0)
                world = _world_in(store, number)
                if number and not world.check([_OVER]):
                    return world
                time.sleep(0.02)
        except RuntimeError:  # the process that was rank 0 there has ended; another may open a store
            time.sleep(0.02)
            continue
        raise CommError(
            f"rank {seat.rank} waited {patience:.0f} s at tcp://{host}:{port}, but all worlds that have met there are "
            "over; has rank 0 called uni.init() again?"
        )


def _own_part(seat: Seat, store: dist.Store) -> dist.Store:
    """Two steps of Slurm on one node may come to the same port: whoever came second must not join the other's world."""
    if seat.how != seats.SRUN:
        return store
    return dist.PrefixStore(f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}", store)


def _world_in(store: dist.Store, number: int) -> dist.Store:
    return dist.PrefixStore(f"world_{number}", store)


def _address(seat: Seat) -> tuple[str, int]:
    if seat.url is not None:
        parsed = urlparse(seat.url)
        assert parsed.hostname is not None
        assert parsed.port is not None
        return parsed.hostname, parsed.port
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise UsageError("RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not; set all four")
    if not port.isdigit():
        raise UsageError(f"MASTER_PORT is {port!r}; expected a number")
    return host, int(port)


def _tcp_store(seat: Seat, host: str, port: int, holds_it: bool, patience: float) -> dist.Store:
    wait = timedelta(seconds=patience)
    try:
        return dist.TCPStore(host, port, seat.size, holds_it, wait, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "already in use" in text:
            how = "" if seat.how == seats.TCP else ": set MASTER_PORT"
            reason = f"cannot open tcp://{host}:{port}: the port is taken; choose another{how}"
        elif "timed out" in text or "timeout" in text.lower():
            reason = f"cannot reach rank 0 at tcp://{host}:{port}: nobody answers there; is rank 0 running?"
        else:
            reason = f"cannot meet the others at tcp://{host}:{port}: {text.splitlines()[0]}"
        raise CommError(f"rank {seat.rank} {reason}") from error


def _file_store(seat: Seat) -> dist.Store:
    path = _path(seat)
    if not path.parent.is_dir():
        raise UsageError(f"{seat.url}: the folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise UsageError(f"{seat.url}: that is a folder; name a file in it that does not exist yet")
    return dist.FileStore(str(path), seat.size)


def _path(seat: Seat) -> Path:
    """A file of its own for every world: the last one's may not have been left by all."""
    assert seat.url is not None
    times = _left_at.get(seat.url, 0)
    return Path(urlparse(seat.url).path + (f".{times}" if times else ""))


def _store_over_mpi(seat: Seat, patience: float) -> dist.Store:
    """Rank 0 opens a store on a free port; MPI itself carries the address to the others."""
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        return _world_at(seat, *_address(seat), patience)
    MPI = mpi.load()
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (seat.rank, seat.size):
        raise CommError(
            f"mpiexec says rank {seat.rank} of {seat.size}, but mpi4py's library says {world.rank} of {world.size}: "
            "mpiexec and mpi4py belong to different MPI libraries; run `unisono doctor`"
        )
    one_host = len(set(world.allgather(socket.gethostname()))) == 1
    if seat.rank != 0:
        address, port = world.bcast(None, root=0)
        return _tcp_store(seat, address, port, False, patience)
    address = "127.0.0.1" if one_host else socket.gethostbyname(socket.gethostname())
    store = _tcp_store(seat, address, 0, True, patience)
    world.bcast((address, store.port), root=0)  # type: ignore[attr-defined]
    return store


def _sign_in(store: dist.Store, seat: Seat) -> None:
    if store.add(f"seat/{seat.rank}", 1) > 1:
        reason = f"rank {seat.rank} has signed in before"
        store.set("refused", reason)
        raise _refusal(seat, reason)
    store.set(f"host/{seat.rank}", f"{seat.size} {host_name()}")
    store.add("came", 1)


def _refusal(seat: Seat, reason: str) -> CommError:
    if seat.how == seats.FILE:
        return CommError(f"{seat.url} was left by an earlier job ({reason}): delete it or name another file")
    return CommError(f"two processes claim the same place in the world ({reason}): give every process its own rank")


def _wait_for_all(store: dist.Store, seat: Seat, patience: float) -> list[str]:
    keys = [f"host/{rank}" for rank in range(seat.size)]
    start = time.monotonic()
    # Not by Store.wait, which prints a warning whenever its time is up.
    while store.add("came", 0) < seat.size:
        if store.check(["refused"]):
            raise _refusal(seat, store.get("refused").decode())
        waited = time.monotonic() - start
        time.sleep(min(0.1, 0.002 + waited / 50))
        if waited > patience:
            missing = [str(rank) for rank in range(seat.size) if not store.check([keys[rank]])]
            raise CommError(
                f"only {seat.size - len(missing)} of {seat.size} ranks came within {patience:.0f} s; "
                f"missing: {', '.join(missing)}"
            )
    told = [value.decode().split(" ", 1) for value in store.multi_get(keys)]
    for rank, (size, _) in enumerate(told):
        if int(size) != seat.size:
            reason = f"rank {seat.rank} was told of {seat.size} ranks, but rank {rank} of {size}"
            raise _refusal(seat, reason) if seat.how == seats.FILE else CommError(reason)
    return [host for _, host in told]


def _with_local_rank(seat: Seat, hosts: list[str]) -> Seat:
    neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[seat.rank]]
    local_rank = neighbours.index(seat.rank) if seat.local_rank is None else seat.local_rank
    local_size = len(neighbours) if seat.local_size is None else seat.local_size
    return replace(seat, local_rank=local_rank, local_size=local_size)
