"""What to run, and where: the description of a job, and of the share that one agent gets of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.launch.hosts import Host, Placement

SCRIPT = "script"
MODULE = "module"
CALL = "call"  # a pickled function, for spawn over MPI


@dataclass(frozen=True)
class Program:
    """A script, a module or a function with its arguments, and the directory to run it in."""

    kind: str
    target: str
    args: tuple[str, ...] = ()
    directory: str = "."


@dataclass(frozen=True)
class Job:
    """Everything the user said about a run."""

    program: Program
    placements: tuple[Placement, ...]
    backend: str | None = None
    environment: dict[str, str] = field(default_factory=dict)  # what the ranks get on top of their host's
    output_directory: str | None = None
    verbose: bool = False
    start_timeout: float = 30.0
    max_restarts: int = 0
    master_port: int = 0  # 0: the first host's system picks a free one
    python: str = ""  # the interpreter on other hosts; "" is the launcher's own
    ssh: tuple[str, ...] = ("ssh",)
    time_limit: float | None = None  # seconds until the job is ended
    hosts: tuple[Host, ...] = ()  # all that were named, also those that no rank needs
    elastic: bool = False  # go on with the hosts that are left when one is gone
    min_ranks: int = 1  # fewer than these are not worth going on with

    @property
    def world(self) -> int:
        return sum(placement.count for placement in self.placements)

    @property
    def several_hosts(self) -> bool:
        return len(self.placements) > 1

    @property
    def elsewhere(self) -> bool:
        """Whether any rank runs on another host than the launcher's."""
        return any(not placement.host.is_local for placement in self.placements)

    def placement_of(self, rank: int) -> Placement:
        for placement in self.placements:
            if placement.first_rank <= rank < placement.first_rank + placement.count:
                return placement
        raise AssertionError(f"rank {rank} has no host")


@dataclass(frozen=True)
class Share:
    """The part of a job that one agent runs: `count` ranks from `first_rank` on."""

    program: Program
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
    attempt: int = 0  # how often the job was restarted before these agents came
    local_rank: int = 0  # of the first rank here, and how many ranks the host has: an MPI agent runs only one
    local_world: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Share:
        program = dict(data["program"])
        program["args"] = tuple(program["args"])
        return cls(**{**data, "program": Program(**program)})
