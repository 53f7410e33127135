"""The rendezvous: how the ranks of a world find each other before they can communicate.

All ranks connect to one key-value store. Each registers its rank; when a rank is missing, registered twice, or comes
from another job (a stale file), the error names it and the reason.

Note: worlds one after the other. A process may leave its world and join the same others again at the same address. At
an address, rank 0 keeps the store that it opened there and numbers the worlds in it: a rank that comes before the next
one is opened finds the last one over, and waits. Where an agent keeps the store, or at a file, each rank counts by
itself.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlparse

import torch.distributed as dist

from unisono.comm.mpi import library
from unisono.comm.rendezvous import launcher_env
from unisono.comm.rendezvous.launcher_env import RankInfo
from unisono.errors import CommError, UsageError
from unisono.launch import environment, scheduler
from unisono.launch.store import program_rendezvous, secret
from unisono.launch.store.client import AuthenticatedStore
from unisono.launch.store.server import StoreServer
from unisono.launch.transport import network

START = 60.0  # seconds that ranks of a launcher get to come, however short the timeout of collectives
_WORLDS = "unisono/worlds"  # in a store: how many worlds have met there
_OVER = "unisono/over"  # in a world's part of it: some rank has left
MOST_WAIT = 300.0  # seconds to wait for the other ranks at most, whatever the timeout of collectives

_worlds_left = 0  # by this process
_left_at: dict[str, int] = {}  # worlds that met at a file, by the file's url
_kept: dict[tuple[str, int], dist.Store] = {}  # the stores that this process has opened at an address
_connections: list[AuthenticatedStore] = []  # to a store that another process serves, of the world that was joined last


@dataclass(frozen=True)
class Rendezvous:
    store: dist.Store
    info: RankInfo  # with local rank and size filled in
    hosts: list[str]  # of every rank
    key: bytes | None = None  # of this world's signatures; None where the job has no secret

    @property
    def ends_the_store(self) -> bool:
        """Whether the store is gone once this rank is."""
        has_no_server = self.info.how in (launcher_env.ALONE, launcher_env.FILE)
        return self.info.rank == 0 and not has_no_server and not _is_agents(self.info)

    def close(self) -> None:
        """The last rank to leave clears away the file through which they met."""
        global _worlds_left
        _worlds_left += 1
        if self.info.how != launcher_env.FILE:
            with contextlib.suppress(RuntimeError):  # rank 0 may have gone before, and the store with it
                self.store.set(_OVER, "1")
            for connection in _connections:
                connection.close()
            _connections.clear()
            return
        assert self.info.url is not None
        closed = self.store.add("unisono/closed", 1)
        path = _path(self.info)
        _left_at[self.info.url] = _left_at.get(self.info.url, 0) + 1
        if closed == self.info.size:
            path.unlink(missing_ok=True)


def rendezvous(info: RankInfo, timeout: float) -> Rendezvous:
    """Reach the store and wait until every rank has registered."""
    # Whoever gives a rendezvous address knows when the others come; a launcher may start ranks slowly.
    timeout = min(timeout if info.url else max(timeout, START), MOST_WAIT)
    store = _open_store(info, timeout)
    registry = dist.PrefixStore("unisono/rendezvous", store)
    _register(registry, info)
    hosts = _wait_for_all(registry, info, timeout)
    key = None if info.how == launcher_env.ALONE else secret.of_job()
    if key is not None:
        key = hmac.digest(key, b"unisono world " + registry.get("salt"), "sha256")
        registry.add("met", 1)
        if info.rank == 0 and not _is_agents(info):
            _serve_until_all_have_met(registry, info, timeout)
    return Rendezvous(store, _with_local_rank(info, hosts), hosts, key)


def _serve_until_all_have_met(registry: dist.Store, info: RankInfo, timeout: float) -> None:
    """A thread of this process serves the store. What comes next may be MPI_Init, which waits for the other ranks and
    lets no thread run Python meanwhile: ranks that still asked the store would wait for this one, and it for them."""
    deadline = time.monotonic() + timeout
    while registry.add("met", 0) < info.size and time.monotonic() < deadline:
        time.sleep(0.002)


def native_store(met: Rendezvous) -> dist.Store:
    """A store of torch's own, at an address that the world's store has: for NCCL, whose threads ask the store of their
    group at any time, and must not wait for Python then. It takes anyone."""
    key, wait = "unisono/native", timedelta(seconds=MOST_WAIT)
    if met.info.rank != 0:
        host, port = met.store.get(key).decode().rsplit(" ", 1)
        return dist.TCPStore(host, int(port), None, False, wait, wait_for_workers=False)
    found = program_rendezvous.address()
    elsewhere = found[0] if found else socket.gethostbyname(socket.gethostname())
    host = "127.0.0.1" if len(set(met.hosts)) == 1 else elsewhere
    listening = network.listen_at(host, 0)
    number = int(listening.getsockname()[1])
    store = dist.TCPStore(host, number, None, True, wait, wait_for_workers=False, master_listen_fd=listening.detach())
    met.store.set(key, f"{host} {number}")
    return store


def host_name() -> str:
    """This host as the user wrote it to the launcher, else as the machine calls itself."""
    return os.environ.get(environment.HOST) or socket.gethostname()


def _open_store(info: RankInfo, timeout: float) -> dist.Store:
    if info.how == launcher_env.ALONE:
        return dist.HashStore()
    if info.how == launcher_env.FILE:
        return _file_store(info)
    key = secret.of_job()
    found = program_rendezvous.address()
    if key is not None and found is not None and info.how in (launcher_env.ENVIRONMENT, launcher_env.MPIEXEC):
        return _agents_part(_authenticated(info, *found, timeout, key))
    if info.how == launcher_env.MPIEXEC:
        return _store_over_mpi(info, timeout)
    host, port = _address(info)
    if not _is_agents(info):
        return _world_at(info, host, port, timeout)
    return _agents_part(_tcp_store(info, host, port, False, timeout))


def _agents_part(store: dist.Store) -> dist.Store:
    """An agent's store outlives the ranks it restarts, and the worlds that they leave."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get(environment.ATTEMPT, "0")
    return dist.PrefixStore(f"attempt_{attempt}/world_{_worlds_left}", store)


def _is_agents(info: RankInfo) -> bool:
    """Whether an agent keeps the store for the ranks that it starts."""
    if info.how not in (launcher_env.ENVIRONMENT, launcher_env.MPIEXEC):
        return False
    is_torchs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and info.how == launcher_env.ENVIRONMENT
    return is_torchs or program_rendezvous.address() is not None


def _world_at(info: RankInfo, host: str, port: int, timeout: float) -> dist.Store:
    """The store of the world that meets at this address next. Rank 0 opens it."""
    if info.rank == 0:
        if (host, port) not in _kept:
            _kept[host, port] = _tcp_store(info, host, port, True, timeout)
        store = _own_part(info, _kept[host, port])
        return _world_in(store, store.add(_WORLDS, 1))
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.1, deadline - time.monotonic())
        store = _own_part(info, _tcp_store(info, host, port, False, left))
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
            f"rank {info.rank} waited {timeout:.0f} s at tcp://{host}:{port}, but all worlds that have met there are "
            "over; has rank 0 called uni.init() again?"
        )


def _own_part(info: RankInfo, store: dist.Store) -> dist.Store:
    """Two steps of Slurm on one node may come to the same port: whoever came second must not join the other's world."""
    if info.how != launcher_env.SRUN:
        return store
    return dist.PrefixStore(f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}", store)


def _world_in(store: dist.Store, number: int) -> dist.Store:
    return dist.PrefixStore(f"world_{number}", store)


def _address(info: RankInfo) -> tuple[str, int]:
    if info.url is not None:
        parsed = urlparse(info.url)
        assert parsed.hostname is not None
        assert parsed.port is not None
        if info.how == launcher_env.SRUN:
            return scheduler.slurm_address(parsed.hostname), parsed.port
        return parsed.hostname, parsed.port
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise UsageError("RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not; set all four")
    if not port.isdigit():
        raise UsageError(f"MASTER_PORT is {port!r}; expected a number")
    return host, int(port)


def _listening(host: str, port: int) -> socket.socket | None:
    """A socket on that address alone: torch's store would listen on every interface of the host. None for a name, which
    may stand for one address here and for another elsewhere, and for an address that is not this host's own."""
    try:
        address = str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host))
        return network.listen(address, port)
    except (ValueError, OSError):
        return None


def _tcp_store(info: RankInfo, host: str, port: int, holds_it: bool, timeout: float) -> dist.Store:
    key = secret.of_job()
    if key is not None:
        return _authenticated(info, host, port, timeout, key, holds_it)
    wait = timedelta(seconds=timeout)
    listening = _listening(host, port) if holds_it else None
    try:
        if listening is None:
            return dist.TCPStore(host, port, info.size, holds_it, wait, wait_for_workers=False)
        port = listening.getsockname()[1]
        handle = listening.detach()
        return dist.TCPStore(host, port, info.size, True, wait, wait_for_workers=False, master_listen_fd=handle)
    except (dist.DistError, RuntimeError) as error:
        raise _no_store(info, host, port, error) from error


def _authenticated(
    info: RankInfo, host: str, port: int, timeout: float, key: bytes, holds_it: bool = False
) -> AuthenticatedStore:
    """The store of a job with a secret."""
    try:
        server = None
        if holds_it:
            server = StoreServer(_listening(host, port) or network.listen("::" if ":" in host else "", port), key)
            port = server.port
        store = AuthenticatedStore(host, port, key, timedelta(seconds=timeout), server)
    except (dist.DistError, OSError) as error:
        raise _no_store(info, host, port, error) from error
    if server is None:
        _connections.append(store)
    return store


def _no_store(info: RankInfo, host: str, port: int, error: Exception) -> CommError:
    text = str(error)
    if "EADDRINUSE" in text or "already in use" in text:
        how = "" if info.how == launcher_env.TCP else ": set MASTER_PORT"
        reason = f"cannot open tcp://{host}:{port}: the port is taken; choose another{how}"
    elif "timed out" in text or "timeout" in text.lower():
        reason = f"cannot reach rank 0 at tcp://{host}:{port}: nobody answers there; is rank 0 running?"
    else:
        reason = f"cannot meet the others at tcp://{host}:{port}: {text.splitlines()[0]}"
    return CommError(f"rank {info.rank} {reason}")


def _file_store(info: RankInfo) -> dist.Store:
    path = _path(info)
    if not path.parent.is_dir():
        raise UsageError(f"{info.url}: the folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise UsageError(f"{info.url}: that is a folder; name a file in it that does not exist yet")
    return dist.FileStore(str(path), info.size)


def _path(info: RankInfo) -> Path:
    """A file of its own for every world: the last one's may not have been left by all."""
    assert info.url is not None
    times = _left_at.get(info.url, 0)
    return Path(urlparse(info.url).path + (f".{times}" if times else ""))


def _store_over_mpi(info: RankInfo, timeout: float) -> dist.Store:
    """Rank 0 opens a store on a free port; MPI itself carries the address to the others."""
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        return _world_at(info, *_address(info), timeout)
    MPI = library.load()
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (info.rank, info.size):
        raise CommError(
            f"mpiexec gives rank {info.rank} of {info.size}, but mpi4py's library gives {world.rank} of {world.size}: "
            "mpiexec and mpi4py belong to different MPI libraries; run `unisono doctor`"
        )
    one_host = len(set(world.allgather(socket.gethostname()))) == 1
    if info.rank != 0:
        address, port = world.bcast(None, root=0)
        return _tcp_store(info, address, port, False, timeout)
    address = "127.0.0.1" if one_host else socket.gethostbyname(socket.gethostname())
    store = _tcp_store(info, address, 0, True, timeout)
    world.bcast((address, store.port), root=0)  # type: ignore[attr-defined]
    return store


def _register(store: dist.Store, info: RankInfo) -> None:
    if store.add(f"rank/{info.rank}", 1) > 1:
        reason = f"rank {info.rank} has registered before"
        store.set("refused", reason)
        raise _refusal(info, reason)
    if info.rank == 0:
        store.set("salt", secrets.token_hex(16))  # what was signed in another world of the job is not valid in this one
    store.set(f"host/{info.rank}", f"{info.size} {host_name()}")
    store.add("came", 1)


def _refusal(info: RankInfo, reason: str) -> CommError:
    if info.how == launcher_env.FILE:
        return CommError(f"{info.url} was left by an earlier job ({reason}): delete it or name another file")
    return CommError(f"two processes claim the same rank of the world ({reason}): give every process its own rank")


def _wait_for_all(store: dist.Store, info: RankInfo, timeout: float) -> list[str]:
    keys = [f"host/{rank}" for rank in range(info.size)]
    start = time.monotonic()
    # Not by Store.wait, which prints a warning whenever its time is up.
    while store.add("came", 0) < info.size:
        if store.check(["refused"]):
            raise _refusal(info, store.get("refused").decode())
        waited = time.monotonic() - start
        time.sleep(min(0.1, 0.002 + waited / 50))
        if waited > timeout:
            missing = [str(rank) for rank in range(info.size) if not store.check([keys[rank]])]
            raise CommError(
                f"only {info.size - len(missing)} of {info.size} ranks came within {timeout:.0f} s; "
                f"missing: {', '.join(missing)}"
            )
    parts = [value.decode().split(" ", 1) for value in store.multi_get(keys)]
    for rank, (size, _) in enumerate(parts):
        if int(size) != info.size:
            reason = f"rank {info.rank} was given {info.size} ranks, but rank {rank} of {size}"
            raise _refusal(info, reason) if info.how == launcher_env.FILE else CommError(reason)
    return [host for _, host in parts]


def _with_local_rank(info: RankInfo, hosts: list[str]) -> RankInfo:
    neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[info.rank]]
    local_rank = neighbours.index(info.rank) if info.local_rank is None else info.local_rank
    local_size = len(neighbours) if info.local_size is None else info.local_size
    return replace(info, local_rank=local_rank, local_size=local_size)
