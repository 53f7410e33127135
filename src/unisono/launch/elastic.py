"""PyTorch's elastic agent over a Crew: it runs the rendezvous, numbers the ranks and restarts them.

Note: how nodes agree on a restart. Elastic lets a node that failed go back to the rendezvous and tells the
others through num_nodes_waiting(). Here a generation number in the shared store says the same: a failed node
moves it from g to g + 1 (only the first of several that failed succeeds), every other node sees a number
above its own, ends its ranks and comes too. A node whose ranks have all finished stays in the monitor loop
until every node's have, so that it still can be called back.
"""

from __future__ import annotations

import datetime
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from unisono.launch import environment, failure, network, preload, rank
from unisono.launch.crew import Crew
from unisono.launch.job import Share
from unisono.launch.reporter import Reporter

_MONITOR = 0.1  # seconds of listening between looks at the other nodes
_STORE_TIMEOUT = datetime.timedelta(seconds=300)
_PARTING = 30.0  # seconds that other nodes get to notice that all have finished


def open_store(share: Share, listening: int | None) -> TCPStore:
    """The store of the job: served by the first node from a socket that is already listening."""
    return TCPStore(
        share.address,
        share.port,
        is_master=listening is not None,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


class Meeting(RendezvousHandler):
    """Nodes with fixed numbers that meet once a generation."""

    def __init__(self, store: TCPStore, share: Share) -> None:
        self._store = store
        self._share = share
        self._generations = PrefixStore("unisono/generations", store)
        self._ranks_store: TCPStore | None = None
        self.generation = -1

    def next_rendezvous(self) -> RendezvousInfo:
        before, now = str(self.generation), str(self.generation + 1)
        self._generations.compare_set("current", "" if self.generation < 0 else before, now)
        self.generation += 1
        if self._share.node == 0:
            self._generations.set(f"port/{now}", str(self._open_ranks_store()))
        if self._generations.add(f"arrived/{now}", 1) == self._share.nodes:
            self._generations.set(f"complete/{now}", "1")
        self._await(f"complete/{now}")
        return RendezvousInfo(
            PrefixStore(f"unisono/agents/{now}", self._store),
            self._share.node,
            self._share.nodes,
            RendezvousStoreInfo(self._share.address, int(self._generations.get(f"port/{now}"))),
        )

    def _await(self, key: str) -> None:
        """Until the key is there. Not by the store's own wait, which no signal ends: a host may never come."""
        deadline, pause = time.monotonic() + _STORE_TIMEOUT.total_seconds(), 0.002
        while not self._generations.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the other nodes did not come within {_STORE_TIMEOUT.total_seconds():g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def _open_ranks_store(self) -> int:
        """Ranks that start again need a store without the keys of those before; the first use the agents'."""
        if self.generation == 0:
            return self._share.port
        door = network.listen("127.0.0.1" if self._share.address == "127.0.0.1" else "", 0)
        port = int(door.getsockname()[1])
        self._ranks_store = open_store(replace(self._share, port=port), door.detach())
        return port

    def await_forks(self) -> None:
        """Until all nodes have forked their ranks: the first node's store must not be busy with some before."""
        if self._generations.add(f"forked/{self.generation}", 1) == self._share.nodes:
            self._generations.set(f"all forked/{self.generation}", "1")
        self._await(f"all forked/{self.generation}")

    def num_nodes_waiting(self) -> int:
        return 1 if int(self._generations.get("current")) > self.generation else 0

    def finished_everywhere(self, first_time: bool) -> bool:
        """Whether the ranks of all nodes have finished; first_time says that this node's just have."""
        count = self._generations.add(f"finished/{self.generation}", 1 if first_time else 0)
        return count == self._share.nodes

    def part(self) -> None:
        """All have finished: the first node keeps the store until the others know it as well."""
        parted = f"parted/{self.generation}"
        if self._generations.add(parted, 1) == self._share.nodes:
            return
        deadline = time.monotonic() + _PARTING
        while self._share.node == 0 and time.monotonic() < deadline:
            if self._generations.add(parted, 0) == self._share.nodes:
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
    """Runs one node's share of a job to its end, restarts included."""

    def __init__(self, share: Share, crew: Crew, store: TCPStore, reporter: Reporter) -> None:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        self._share = share
        self._crew = crew
        self._meeting = Meeting(store, share)
        self._reporter = reporter
        self._finished = False
        self.stop_signal = signal.SIGTERM
        self.take_time: Callable[[], None] = lambda: None  # what comes before ranks are made to end
        spec = WorkerSpec(
            role="default",
            local_world_size=share.count,
            rdzv_handler=self._meeting,
            entrypoint=rank.run,
            max_restarts=share.max_restarts,
            monitor_interval=1e-3,  # the waiting is done in _monitor_workers, where output is passed on
        )
        super().__init__(spec)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if torch.cuda.is_initialized():
            raise AssertionError("ranks must not be forked after CUDA was initialised")
        self._finished = False
        preload.load([member.record for member in self._crew.members.values()])
        self._crew.clear()
        attempt = self._attempt
        self._reporter.started(attempt)
        ids: dict[int, Any] = {}
        port = worker_group.master_port
        assert port is not None
        for worker in worker_group.workers:
            variables = {
                **self._share.environment,
                **environment.of_rank(
                    rank=worker.global_rank,
                    world=worker.world_size,
                    local_rank=worker.local_rank,
                    local_world=self._share.count,
                    node=self._share.node,
                    nodes=self._share.nodes,
                    address=self._share.address,
                    port=port,
                    host=self._share.host,
                    attempt=attempt,
                ),
                **environment.of_elastic(attempt, self._share.max_restarts),
            }
            ids[worker.local_rank] = self._crew.start(worker.global_rank, variables, self._run_program)
        self._meeting.await_forks()
        self._crew.release()
        return ids

    @property
    def _attempt(self) -> int:
        """How often the job was restarted, these agents' own restarts included."""
        return self._share.attempt + self._meeting.generation

    def _run_program(self, results: int | None) -> int:
        return rank.run(self._share.program, results)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._crew.pump(_MONITOR)
        if self._crew.failures():
            # restarts count for the job, not for each node by itself
            self._remaining_restarts = 0 if self._is_hopeless() else self._share.max_restarts - self._attempt
            self._reporter.failed(self._crew, self._attempt, self._remaining_restarts > 0)
            return RunResult(state=WorkerState.FAILED)
        if self._crew.running:
            return RunResult(state=WorkerState.HEALTHY)
        first_time, self._finished = not self._finished, True
        if not self._meeting.finished_everywhere(first_time):
            return RunResult(state=WorkerState.HEALTHY)
        self._meeting.part()
        return RunResult(state=WorkerState.SUCCEEDED)

    def _is_hopeless(self) -> bool:
        return any(each.kind == failure.USAGE for each in self._crew.failures())

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._crew.stop()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0, is_restart: bool = False) -> None:
        self.take_time()
        self._crew.stop(self.stop_signal)

    def _exit_barrier(self) -> None:
        """Nothing to wait for: _monitor_workers reports success only when every node has finished."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        """Without the host's full name, whose lookup can take seconds where name service is slow."""
        return Event(f"torchelastic.worker.status.{state}", source=source)

    def _record_worker_events(self, result: RunResult) -> None:
        pass
