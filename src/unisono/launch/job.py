"""LaunchJob: what to run, and where. NodeJob: the part of it that one agent runs."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.launch import environment
from unisono.launch.hosts import Host, Placement
from unisono.launch.scheduler import NodeGroup

SCRIPT = "script"
MODULE = "module"
COMMAND = "command"  # any executable, for --no-python
CALL = "call"  # a pickled function, for spawn over MPI


_START, _START_MPI, _START_GROUP = 30.0, 60.0, 300.0  # seconds; schedulers may start one node long after another
_START_MPI_RANK = 1.0  # for each rank, which mpiexec starts as a process of its own


def default_start_timeout(ranks: int, backend: str | None, of_group: bool) -> float:
    """Seconds for the start, where the user has not chosen them."""
    if of_group:
        return _START_GROUP
    return _START_MPI + _START_MPI_RANK * ranks if backend == "mpi" else _START


@dataclass(frozen=True)
class Entrypoint:
    """A script, a module, a command or a function with its arguments, and the directory to run it in."""

    kind: str
    target: str
    args: tuple[str, ...] = ()
    directory: str = "."


@dataclass(frozen=True)
class LaunchJob:
    """The options of a run."""

    program: Entrypoint
    placements: tuple[Placement, ...]
    backend: str | None = None
    environment: dict[str, str] = field(default_factory=dict)  # of the ranks, in addition to their host's
    output_directory: str | None = None
    verbose: bool = False
    start_timeout: float = _START
    max_restarts: int = 0
    master_port: int = 0  # 0: a free port of the first host
    python: str = ""  # the interpreter on other hosts; "" is the launcher's own
    ssh: tuple[str, ...] = ("ssh",)
    time_limit: float | None = None  # seconds
    hosts: tuple[Host, ...] = ()  # all that were given, also those without ranks
    elastic: bool = False  # continue on the remaining hosts when one is lost
    min_ranks: int = 1  # end the job when fewer remain
    returns: int = 0  # starts because a lost host had come back, which are not counted as restarts
    encrypt: bool = False  # what ranks of different hosts say
    group: NodeGroup | None = None  # the other nodes have launchers of their own, started by a scheduler

    @property
    def world(self) -> int:
        return self.group.world if self.group else sum(placement.count for placement in self.placements)

    @property
    def several_hosts(self) -> bool:
        return len(self.placements) > 1 or (self.group is not None and self.group.nodes > 1)

    @property
    def elsewhere(self) -> bool:
        """Whether any rank runs on another host than the launcher's."""
        return any(not placement.host.is_local for placement in self.placements)

    def _is_local(self, host: str) -> bool:
        return any(placement.host.is_local for placement in self.placements if placement.host.name == host)

    def placement_of(self, rank: int) -> Placement:
        for placement in self.placements:
            if placement.first_rank <= rank < placement.first_rank + placement.count:
                return placement
        raise AssertionError(f"rank {rank} has no host")

    def on_node(self, node: int, host: str, ranks: range, address: str, port: int, attempt: int) -> NodeJob:
        """The part of the agent that runs these ranks."""
        return NodeJob(
            program=self.program,
            host=host,
            node=node,
            nodes=self.group.nodes if self.group else len(self.placements),
            first_rank=ranks.start,
            count=len(ranks),
            world=self.world,
            address=address,
            port=port,
            environment=self.environment,
            max_restarts=self.max_restarts + self.returns,
            attempt=attempt,
            identity=self.group.job if self.group else "",
            start_timeout=self.start_timeout if self.group else 0.0,
            local_offset=self.group.local_offset if self.group else 0,
            ranks_on_host=self.group.local_world if self.group else 0,
            encrypt=self.encrypt and self.several_hosts,
            launcher=os.getpid() if self.group or self._is_local(host) else 0,
        )


@dataclass(frozen=True)
class NodeJob:
    """The part of a job that one agent runs: `count` ranks from `first_rank` on."""

    program: Entrypoint
    host: str
    node: int
    nodes: int
    first_rank: int
    count: int
    world: int
    address: str
    port: int
    environment: dict[str, str]
    max_restarts: int = 0
    attempt: int = 0  # restarts of the job before these agents started
    local_rank: int = 0  # with local_world: set under MPI, where each agent runs one rank of its host
    local_world: int = 0
    program_port: int = 0  # the same: MASTER_PORT of programs that do not meet in the job's store
    identity: str = ""  # of a job whose nodes have launchers of their own: equal on all of them
    start_timeout: float = 0.0  # with it: seconds in which the first node must be up; 0: it is
    local_offset: int = 0  # local rank of the first rank, where a host has several nodes
    ranks_on_host: int = 0  # ranks of all of those
    secret: str = field(default="", repr=False)  # in hexadecimal digits; "": see store.secret.of_job
    encrypt: bool = False  # what its ranks and those of other nodes say: see launch.tunnel
    launcher: int = 0  # its process id; 0 on other hosts

    def rank_variables(self, rank: int, local_rank: int, local_world: int, port: int, attempt: int) -> dict[str, str]:
        """The environment of one rank."""
        return {
            **self.environment,
            environment.LAUNCHER: str(self.launcher),
            **environment.of_rank(
                rank=rank,
                world=self.world,
                local_rank=local_rank,
                local_world=local_world,
                node=self.node,
                nodes=self.nodes,
                address=self.address,
                port=port,
                host=self.host,
                attempt=attempt,
            ),
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodeJob:
        program = dict(data["program"])
        program["args"] = tuple(program["args"])
        return cls(**{**data, "program": Entrypoint(**program)})
