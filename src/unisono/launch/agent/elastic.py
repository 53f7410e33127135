"""PyTorch's elastic agent over a WorkerPool: runs the rendezvous, numbers the ranks and restarts them.

Note: how nodes agree on a restart. In torch elastic a failed node re-enters the rendezvous, and the others notice by
num_nodes_waiting(). Here a generation number in the shared store has that role: a failed node moves it from g to g + 1
(only the first of several succeeds); every other node sees a number above its own, stops its ranks and joins. A node
whose ranks have all finished stays in the monitor loop until those of every node have, so that it can still restart.
Where a scheduler starts the nodes, it may replace one that was lost: the new one joins in the next generation.
"""

from __future__ import annotations

import datetime
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from unisono.errors import LaunchError
from unisono.launch import environment
from unisono.launch.agent.connection import Reporter
from unisono.launch.job import NodeJob
from unisono.launch.outcome import failure
from unisono.launch.store import program_rendezvous
from unisono.launch.store.client import AuthenticatedStore
from unisono.launch.store.server import StoreServer
from unisono.launch.transport import network
from unisono.launch.tunnel import addresses
from unisono.launch.tunnel.host_tunnel import HostTunnel
from unisono.launch.worker import rank_main
from unisono.launch.worker.pool import WorkerPool

_MONITOR = 0.1  # seconds of forwarding output between checks of the other nodes
_STORE_TIMEOUT = datetime.timedelta(seconds=300)
_EXIT_TIMEOUT = 30.0  # seconds in which the other nodes must notice that all have finished
_HEARD = 1.0  # seconds in which they notice that the job cannot start


def open_store(job: NodeJob, key: bytes | None, listening: socket.socket | None) -> Store:
    """The job's store, served by the first node from a socket that is already listening. Without a key, which nodes
    started by a scheduler may not have, it is one that takes anyone."""
    if job.start_timeout and listening is None:
        _await_first_node(job)
    if key is None:
        return _open_store(job, listening)
    server = None if listening is None else StoreServer(listening, key)
    return AuthenticatedStore(job.address, job.port, key, _STORE_TIMEOUT, server)


def _open_store(job: NodeJob, listening: socket.socket | None) -> TCPStore:
    return TCPStore(
        job.address,
        job.port,
        is_master=listening is not None,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _await_first_node(job: NodeJob) -> None:
    """Where a scheduler starts the nodes, the first one may be the last to start, or its name not be known yet."""
    deadline = time.monotonic() + job.start_timeout
    while isinstance(cause := network.reach(job.address, job.port, 3.0), str):
        if time.monotonic() > deadline:
            where = f"node 0 at {job.address} port {job.port}"
            raise LaunchError(f"node {job.node} cannot reach {where} within {job.start_timeout:g} s: {cause}")
        time.sleep(0.1)


class NodeRendezvous(RendezvousHandler):
    """A rendezvous of nodes with fixed numbers, once a generation."""

    def __init__(self, store: Store, job: NodeJob) -> None:
        self._store = store
        self._server = store.server if isinstance(store, AuthenticatedStore) else None
        self._reserved: socket.socket | None = None
        self._job = job
        self._generations = PrefixStore("unisono/generations", store)
        self._ranks_store: TCPStore | None = None
        self._tunnel: HostTunnel | None = None
        self._store_at = job.address, job.port
        self.generation = -1

    def join(self) -> None:
        """First of all: check that this node belongs to the job, and find the generation where one that replaces a lost
        node continues. LaunchError if it does not belong there."""
        job = self._job
        version = sys.modules["unisono"].__version__
        own = f"{job.nodes} nodes of {job.count} ranks, unisono {version}, torch {torch.__version__}"
        own += ", --encrypt" if job.encrypt else ""
        own += f", {job.identity}" if job.identity else ""
        first = self._generations.compare_set("job", "", own).decode()
        if first != own:
            refusal = f"node {job.node} has {own}, but another node of the job at {job.address}: {first}"
            is_of_job = not job.identity or first.endswith(f", {job.identity}")
            if is_of_job and not self._generations.check(["complete/0"]):
                self._generations.set("refusal", refusal)
            raise self._refused(refusal)
        if self._generations.add(f"joined/{job.node}", 1) == 1 or not self._generations.check(["current"]):
            return
        current = int(self._generations.get("current"))
        is_running = self._generations.check([f"complete/{current}"])
        if is_running and job.attempt + current >= job.max_restarts:
            raise LaunchError(
                f"node {job.node} has joined the job at {job.address} before: either two nodes have this number, or "
                f"the node was restarted and --max-restarts {job.max_restarts} does not allow it"
            )
        self.generation = current if is_running else current - 1

    def next_rendezvous(self) -> RendezvousInfo:
        before, now = str(self.generation), str(self.generation + 1)
        self._generations.compare_set("current", "" if self.generation < 0 else before, now)
        self.generation += 1
        if self._job.node == 0:
            self._generations.set(f"port/{now}", str(self._open_ranks_store()))
        is_first = self._generations.add(f"arrived/{now}/{self._job.node}", 1) == 1
        if is_first and self._generations.add(f"arrived/{now}", 1) == self._job.nodes:
            self._generations.set(f"complete/{now}", "1")
        self._await(f"complete/{now}")
        return RendezvousInfo(
            PrefixStore(f"unisono/agents/{now}", self._store),
            self._job.node,
            self._job.nodes,
            RendezvousStoreInfo(self._job.address, int(self._generations.get(f"port/{now}"))),
        )

    def _await(self, key: str) -> None:
        """Wait for the key by polling: no signal interrupts the store's own wait, and a host may never arrive."""
        seconds = self._job.start_timeout or _STORE_TIMEOUT.total_seconds()
        deadline, pause = time.monotonic() + seconds, 0.002
        while not self._generations.check([key]) and not self.num_nodes_waiting():
            if self._generations.check(["refusal"]) and not self._generations.check(["complete/0"]):
                raise self._refused(self._generations.get("refusal").decode())
            if time.monotonic() > deadline:
                raise LaunchError(f"not all {self._job.nodes} nodes have joined within {seconds:g} s{self._absence()}")
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def _refused(self, refusal: str) -> LaunchError:
        if self._job.node == 0:
            time.sleep(_HEARD)  # it serves the store in which the others read it
        return LaunchError(refusal)

    def _absence(self) -> str:
        """Of a start, who is missing; two nodes of one number leave another out."""
        times = [self._generations.add(f"arrived/{self.generation}/{node}", 0) for node in range(self._job.nodes)]
        missing = [str(node) for node, count in enumerate(times) if not count]
        twice = [str(node) for node, count in enumerate(times) if count > 1]
        absence = f"; missing: node {', '.join(missing)}" if missing else ""
        return absence + (f"; more than one launcher said that it is node {', '.join(twice)}" if twice else "")

    def _open_ranks_store(self) -> int:
        """Port of the ranks' store: the agents' own for the first generation, a new one without old keys later. Where
        ranks meet in an authenticated store, a port that torch's store may have in a program that wants one."""
        if isinstance(self._store, AuthenticatedStore):
            self._reserved = network.reserve_port()
            return int(self._reserved.getsockname()[1])
        if self.generation == 0:
            return self._job.port
        server = network.listen_at(self._job.address, 0)
        port = int(server.getsockname()[1])
        self._ranks_store = _open_store(replace(self._job, port=port), server)
        return port

    def variables(self, port: int) -> dict[str, str]:
        """By which ranks find their store."""
        is_own = isinstance(self._store, AuthenticatedStore)
        found = program_rendezvous.variables(*self._store_at, port) if is_own else {}
        return found if self._tunnel is None else found | addresses.variables(self._job.node, port, self._tunnel.folder)

    def open_tunnel(self, folder: Path) -> None:
        """With --encrypt: a tunnel for the ranks of this generation, once those of all nodes have been introduced."""
        job, now = self._job, self.generation
        if self._tunnel is not None:
            self._tunnel.close()
        own_address = network.source_address(job.address)
        self._tunnel = HostTunnel(job.host, own_address, folder)
        self._generations.set(f"tunnel/{now}/{job.node}", json.dumps(self._tunnel.introduction))
        if self._generations.add(f"tunnels/{now}", 1) == job.nodes:
            self._generations.set(f"all tunnels/{now}", "1")
        self._await(f"all tunnels/{now}")
        if self.num_nodes_waiting():
            return  # to a restart: these ranks will be stopped
        introductions = self._generations.multi_get([f"tunnel/{now}/{node}" for node in range(job.nodes)])
        store = None if self._server is None else (self._server.address or own_address, job.port)
        store_port = self._tunnel.connect(job.node, store, [json.loads(each) for each in introductions])
        if store is None:
            self._store_at = "127.0.0.1", store_port

    def require_tunnel(self) -> None:
        """LaunchError where it has ended."""
        if self._tunnel is not None:
            self._tunnel.require_running()

    def standing_still(self) -> AbstractContextManager[None]:
        """In the block this process may fork."""
        return nullcontext() if self._server is None else self._server.standing_still()

    def refused(self) -> tuple[int, str]:
        """How many connections to the store have not proved that they belong to the job, and whence the first came."""
        return (0, "") if self._server is None else (self._server.refused, self._server.first_refused)

    def await_forks(self) -> None:
        """Wait until all nodes have forked their ranks: no rank may use the first node's store before."""
        if self._generations.add(f"forked/{self.generation}", 1) == self._job.nodes:
            self._generations.set(f"all forked/{self.generation}", "1")
        self._await(f"all forked/{self.generation}")

    def num_nodes_waiting(self) -> int:
        return 1 if int(self._generations.get("current")) > self.generation else 0

    def finished_everywhere(self, first_time: bool) -> bool:
        """Whether the ranks of all nodes have finished; first_time: those of this node just have."""
        count = self._generations.add(f"finished/{self.generation}", 1 if first_time else 0)
        return count == self._job.nodes

    def exit_barrier(self) -> None:
        """All have finished: the first node serves the store until the others know it as well."""
        exited = f"exited/{self.generation}"
        if self._generations.add(exited, 1) == self._job.nodes:
            return
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while self._job.node == 0 and time.monotonic() < deadline:
            if self._generations.add(exited, 0) == self._job.nodes:
                return
            time.sleep(0.01)

    def get_backend(self) -> str:
        return "unisono"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return "unisono"

    def shutdown(self) -> bool:
        return True


class Agent(SimpleElasticAgent):
    """Runs a NodeJob to its end, restarts included."""

    def __init__(self, job: NodeJob, pool: WorkerPool, store: Store, reporter: Reporter) -> None:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        self._job = job
        self._pool = pool
        self._handler = NodeRendezvous(store, job)
        if job.start_timeout:
            self._handler.join()
        self._reporter = reporter
        self._finished = False
        self.stop_signal = signal.SIGTERM
        self.before_shutdown: Callable[[], None] = lambda: None
        spec = WorkerSpec(
            role="default",
            local_world_size=job.count,
            rdzv_handler=self._handler,
            entrypoint=rank_main.run,
            max_restarts=job.max_restarts,
            monitor_interval=1e-3,  # _monitor_workers waits, and forwards output meanwhile
        )
        super().__init__(spec)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if torch.cuda.is_initialized():
            raise AssertionError("ranks must not be forked after CUDA was initialised")
        self._finished = False
        self._pool.clear()
        attempt = self._attempt
        self._reporter.started(attempt)
        ids: dict[int, Any] = {}
        offset, ranks_here = self._job.local_offset, self._job.ranks_on_host or self._job.count
        port = worker_group.master_port
        assert port is not None
        if self._job.encrypt:
            self._handler.open_tunnel(self._pool.folder)
        with self._handler.standing_still():
            for worker in worker_group.workers:
                variables = self._job.rank_variables(
                    worker.global_rank, offset + worker.local_rank, ranks_here, port, attempt
                )
                variables |= environment.of_elastic(attempt, self._job.max_restarts)
                variables |= self._handler.variables(port)
                ids[worker.local_rank] = self._pool.start(worker.global_rank, variables, self._run_program)
        self._handler.await_forks()
        self._pool.release()
        return ids

    @property
    def _attempt(self) -> int:
        """Restarts of the job so far, those by these agents included."""
        return self._job.attempt + self._handler.generation

    def _run_program(self, results: int | None) -> int:
        return rank_main.run(self._job.program, results)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pool.pump(_MONITOR)
        self._reporter.refused(*self._handler.refused())
        self._handler.require_tunnel()
        if self._pool.failures():
            # restarts are counted for the job, not for each node
            self._remaining_restarts = 0 if self._is_permanent() else self._job.max_restarts - self._attempt
            self._reporter.failed(self._pool, self._attempt, self._remaining_restarts > 0)
            return RunResult(state=WorkerState.FAILED)
        if self._pool.running:
            return RunResult(state=WorkerState.HEALTHY)
        first_time, self._finished = not self._finished, True
        if not self._handler.finished_everywhere(first_time):
            return RunResult(state=WorkerState.HEALTHY)
        self._handler.exit_barrier()
        return RunResult(state=WorkerState.SUCCEEDED)

    def _is_permanent(self) -> bool:
        return any(each.kind == failure.USAGE for each in self._pool.failures())

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._pool.stop()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0, is_restart: bool = False) -> None:
        self.before_shutdown()
        self._pool.stop(self.stop_signal)

    def _exit_barrier(self) -> None:
        """Nothing to wait for: _monitor_workers reports success only when every node has finished."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        """Without the host's full name: its lookup can take seconds where name service is slow."""
        return Event(f"torchelastic.worker.status.{state}", source=source)

    def _record_worker_events(self, result: RunResult) -> None:
        pass
