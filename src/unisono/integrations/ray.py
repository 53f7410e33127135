"""`run`: a function on ranks that are actors of Ray.

    from unisono.integrations import ray

    losses = ray.run(train, ranks=8, args=("/shared/run",), cpus_per_rank=4, max_restarts=2)

One attempt: Ray reserves a placement group with a bundle for each rank. Ranks are numbered node by node; each is an
actor in its bundle, which sets the variables of a rank and calls the function. Ranks meet at a store that rank 0 opens
on its node. When a rank raises or its process dies, the attempt is over: all actors are ended, and the first failure is
shown as `unisono run` shows it. With restarts left, Ray reserves a new group on the nodes that are there then and new
actors run the function; `Engine.fit(save=...)` resumes from its run folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

from unisono.errors import LaunchError, MissingPackageError, UsageError
from unisono.launch import environment
from unisono.launch.console import Console
from unisono.launch.outcome import failure, verdict
from unisono.launch.outcome.verdict import RankFailure
from unisono.launch.transport import network
from unisono.launch.worker import rank_main

try:
    import ray
    from ray import cloudpickle
except ImportError:
    raise MissingPackageError("ray", "unisono.integrations.ray", "ray") from None
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_BACKENDS = (None, "gloo", "nccl")
_SETTLE = 0.5  # seconds after a failure in which other ranks may report an earlier one
_SETTLE_PEER = 30.0  # the same while only broken connections are known: Ray takes a while to notice a lost node
_NOTES_TIMEOUT = 60.0  # seconds to read the failure records of a node
_PAUSE = 1.0  # seconds between two attempts to start actors


def run(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    *,
    backend: str | None = None,
    placement: str = "PACK",
    cpus_per_rank: float = 1,
    gpus_per_rank: float = 0,
    max_restarts: int = 0,
    start_timeout: float = 300.0,
) -> list[Any]:
    """Run function(*args) on ranks that are actors of Ray.

    Where this process is not connected to Ray, it connects as `ray.init()` does, and disconnects at the end.

    Args:
        function: What every rank calls; in it, `uni.init()` and `uni.Engine` find their ranks.
        ranks: How many ranks.
        args: Its arguments.
        backend: "gloo" or "nccl"; default: nccl if ranks have GPUs.
        placement: Ray's strategy of the placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        cpus_per_rank: CPUs that Ray reserves for a rank; it computes with as many threads.
        gpus_per_rank: GPUs that Ray reserves for a rank.
        max_restarts: After a failure, start all ranks again, so many times at most.
        start_timeout: Seconds in which Ray must place and start the ranks of an attempt.

    Returns:
        The results, by rank.

    Raises:
        LaunchError: A rank failed, and no restart is left; or Ray could not start the ranks.
    """
    _validate(function, ranks, args, backend, placement, cpus_per_rank, gpus_per_rank, max_restarts, start_timeout)
    resources = {name: value for name, value in (("CPU", cpus_per_rank), ("GPU", gpus_per_rank)) if value}
    call = _pickled(function, tuple(args))
    if backend is None:
        backend = "nccl" if gpus_per_rank else "auto"
    variables = environment.forwarded(dict(os.environ)) | {environment.BACKEND: backend}
    with _connected():
        _require_room(ranks.__index__(), resources)
        job = _Job(ray.put(call), ranks.__index__(), placement, resources, variables, max_restarts, start_timeout)
        return [cloudpickle.loads(result) for result in _until_success(job)]


@dataclass(frozen=True)
class _Job:
    call: Any  # a reference to the pickled function and its arguments
    ranks: int
    placement: str
    resources: dict[str, float]  # of a rank
    variables: dict[str, str]
    max_restarts: int
    start_timeout: float


def _until_success(job: _Job) -> list[bytes]:
    console = Console()
    for attempt in range(job.max_restarts + 1):
        with _started(job, attempt) as actors:
            ended = actors.await_end(job.call, job.variables)
        if not ended.failures:
            return [ended.results[rank] for rank in range(job.ranks)]
        first = verdict.first(ended.failures)
        host = actors.host_of(first.rank)
        if first.kind == failure.USAGE or attempt == job.max_restarts:
            break
        console.message(f"restart {attempt + 1} of {job.max_restarts}: {verdict.summary(first, host)}")
    raise LaunchError(verdict.describe(first, host, ended.last_operations))


# ---- a rank ------------------------------------------------------------------------------------------------------


class _Rank:
    """The actor. Ray calls its methods in the main thread of a process that has run nothing else."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:  # Ray writes it before each line of the output
        return f"rank {self._rank}"

    def prepare(self) -> tuple[str, int]:
        """The path of this rank's failure record, and a free port of its node."""
        folder = tempfile.mkdtemp(prefix="unisono-ray-")
        with network.listen("", 0) as server:
            return os.path.join(folder, "failure.json"), int(server.getsockname()[1])

    def run(self, call: bytes, variables: dict[str, str]) -> tuple[bytes, RankFailure | None]:
        """(the pickled result, None), or what went wrong."""
        os.environ.update(variables)
        interface = network.interface_of(ray.util.get_node_ip_address())
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        code, loaded = rank_main.attempt(cloudpickle.loads, call)
        if not code:
            function, args = loaded
            code, result = rank_main.attempt(function, *args)
        if not code:
            code, _ = rank_main.attempt(_leave_world)
        if not code:
            code, pickled = rank_main.attempt(cloudpickle.dumps, result)
        if not code:
            return pickled, None
        recorded = failure.read(Path(os.environ[environment.FAILURE_FILE]))
        return b"", _failure(self._rank, recorded, code)


def _leave_world() -> None:
    """As at the end of a process: others need not wait for this rank any more."""
    from unisono.comm.rendezvous import world  # imports torch

    world.shutdown()


def _failure(rank: int, recorded: failure.Failure | None, code: int) -> RankFailure:
    if recorded is None:
        return RankFailure(rank, verdict.EXIT, "", 0.0, code)
    return RankFailure(rank, recorded.kind, recorded.text, time.time() - recorded.when, recorded.code)


# ---- the ranks of one attempt ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    id: str
    address: str
    name: str


@dataclass
class _End:
    results: dict[int, bytes] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)
    last_operations: dict[int, str] = field(default_factory=dict)


class _Actors:
    """A placement group and the actors in it."""

    def __init__(self, job: _Job, attempt: int) -> None:
        self._job = job
        self._attempt = attempt
        self._group = placement_group([job.resources] * job.ranks, strategy=job.placement)
        self._actors: list[Any] = []
        self._nodes: list[_Node] = []  # of each rank
        self._records: list[str] = []
        self._port = 0

    def start(self, timeout: float) -> None:
        """Place the ranks, and wait until their actors are up. RayError or LaunchError if they are not."""
        deadline = time.monotonic() + timeout
        if not self._group.wait(max(timeout, 0.1)):
            raise LaunchError(
                f"Ray has reserved no {self._job.placement} placement group for {self._job.ranks} ranks with "
                f"{_described(self._job.resources)} each within {self._job.start_timeout:g} s; do other jobs hold "
                "them? `ray status` shows it, and start_timeout= is how long to wait"
            )
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        known = _alive_nodes()
        order = list(dict.fromkeys(node_of[bundle] for bundle in range(self._job.ranks)))
        bundles = sorted(range(self._job.ranks), key=lambda bundle: (order.index(node_of[bundle]), bundle))
        if not set(order) <= known.keys():
            raise RayError("a node was lost before its ranks started")
        self._nodes = [known[node_of[bundle]] for bundle in bundles]
        actor_class = ray.remote(_Rank)
        for rank, bundle in enumerate(bundles):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            options = {"num_cpus": self._job.resources.get("CPU", 0), "num_gpus": self._job.resources.get("GPU", 0)}
            self._actors.append(actor_class.options(scheduling_strategy=strategy, **options).remote(rank))
        prepared = [actor.prepare.remote() for actor in self._actors]
        replies = ray.get(prepared, timeout=max(deadline - time.monotonic(), 0.1))
        self._records = [record for record, _ in replies]
        self._port = replies[0][1]

    def await_end(self, call: Any, variables: dict[str, str]) -> _End:
        """Run the call on all ranks until the last has returned or the first failure is known."""
        waiting = {
            actor.run.remote(call, variables | self._variables(rank)): rank for rank, actor in enumerate(self._actors)
        }
        end, dead = _End(), dict[int, RayError]()
        since = math.inf
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=0.1)
            for reference in done:
                rank = waiting.pop(reference)
                try:
                    result, failed = ray.get(reference)
                except RayError as error:
                    dead[rank] = error
                    continue
                if failed is None:
                    end.results[rank] = result
                else:
                    end.failures.append(failed)
            if dead or end.failures:
                since = min(since, time.monotonic())
                is_known = bool(dead) or not all(each.is_consequence for each in end.failures)
                if time.monotonic() - since >= (_SETTLE if is_known else _SETTLE_PEER):
                    break
        self.end()
        notes = self._read_notes()
        if dead or end.failures:
            end.last_operations = {rank: operation for rank, (_, operation) in notes.items() if operation}
        for rank, cause in dead.items():
            recorded, _ = notes.get(rank, (None, ""))
            if recorded is None:  # killed: whatever others report follows from it
                end.failures.append(
                    RankFailure(rank, verdict.EXIT, f"its process has died; Ray: {_cause(cause)}", math.inf, 1)
                )
            else:
                end.failures.append(_failure(rank, recorded, recorded.code))
        return end

    def _variables(self, rank: int) -> dict[str, str]:
        """The identity of a rank; ranks of a node follow each other."""
        order = list(dict.fromkeys(node.id for node in self._nodes))
        here = [other for other, node in enumerate(self._nodes) if node.id == self._nodes[rank].id]
        variables = environment.of_rank(
            rank=rank,
            world=self._job.ranks,
            local_rank=here.index(rank),
            local_world=len(here),
            node=order.index(self._nodes[rank].id),
            nodes=len(order),
            address=self._nodes[0].address,
            port=self._port,
            host=self._nodes[rank].name,
            attempt=self._attempt,
        )
        return variables | {environment.FAILURE_FILE: self._records[rank]}

    def host_of(self, rank: int) -> str | None:
        """The name of a rank's node; None if all are on one."""
        return self._nodes[rank].name if len({node.id for node in self._nodes}) > 1 else None

    def _read_notes(self) -> dict[int, tuple[failure.Failure | None, str]]:
        """By rank, where its node is still there: its failure record and its last operation. Removes them."""
        pending = []
        alive = _alive_nodes()
        for node in {node.id for node in self._nodes} & alive.keys():
            records = {rank: path for rank, path in enumerate(self._records) if self._nodes[rank].id == node}
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            pending.append(ray.remote(_take_notes).options(num_cpus=0, scheduling_strategy=strategy).remote(records))
        found: dict[int, tuple[failure.Failure | None, str]] = {}
        done, _ = ray.wait(pending, num_returns=len(pending), timeout=_NOTES_TIMEOUT) if pending else ([], [])
        for reference in done:
            with contextlib.suppress(RayError):  # the node has been lost meanwhile
                found |= ray.get(reference)
        return found

    def end(self) -> None:
        """End the actors and return what was reserved for them. May be called again."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        remove_placement_group(self._group)


@contextlib.contextmanager
def _started(job: _Job, attempt: int) -> Iterator[_Actors]:
    """The actors of an attempt, up; they end with the block. Nodes that are lost meanwhile are replaced by others."""
    deadline = time.monotonic() + job.start_timeout
    while True:
        actors = _Actors(job, attempt)
        try:
            actors.start(deadline - time.monotonic())
        except RayError as error:
            actors.end()
            if isinstance(error, GetTimeoutError) or time.monotonic() > deadline:
                raise LaunchError(
                    f"Ray did not start {job.ranks} ranks in {job.start_timeout:g} s: {_cause(error)}"
                ) from None
            time.sleep(_PAUSE)
            continue
        except BaseException:
            actors.end()
            raise
        break
    try:
        yield actors
    finally:
        actors.end()


def _take_notes(records: dict[int, str]) -> dict[int, tuple[failure.Failure | None, str]]:
    """On a node: what its ranks have left."""
    found = {}
    for rank, record in records.items():
        found[rank] = failure.read(Path(record)), failure.read_last_operation(failure.last_operation_of(record))
        shutil.rmtree(os.path.dirname(record), ignore_errors=True)
    return found


def _cause(error: RayError) -> str:
    """Ray's reason in one line, without its list of what is common."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = next((line for line in lines if "dead because" in line), lines[0])
    return re.split(r"\s+(?:Some common causes|There are some potential)", reason)[0]


# ---- the cluster -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        yield
    finally:
        ray.shutdown()


def _alive_nodes() -> dict[str, _Node]:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = [node["NodeManagerHostname"] for node in nodes]
    return {
        node["NodeID"]: _Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            name if names.count(name) == 1 else f"{name}/{node['NodeID'][:8]}",
        )
        for node, name in zip(nodes, names, strict=True)
    }


def _require_room(ranks: int, resources: dict[str, float]) -> None:
    room = {}
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            name = f"{node['NodeManagerHostname']}/{node['NodeID'][:8]}"
            room[name] = min(math.floor(has.get(kind, 0) / needed + 1e-9) for kind, needed in resources.items())
    if sum(room.values()) < ranks:
        listed = ", ".join(f"{count} on {name}" for name, count in room.items())
        raise UsageError(
            f"ranks={ranks} with {_described(resources)} each do not fit: Ray's cluster has room for "
            f"{sum(room.values())} ({listed}); use fewer ranks, or add nodes with `ray start --address=...`"
        )


def _described(resources: dict[str, float]) -> str:
    return " and ".join(f"{value:g} {kind}{'s' if value > 1 else ''}" for kind, value in resources.items())


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return bytes(cloudpickle.dumps((function, args)))
    except Exception as error:
        raise UsageError(
            f"ray.run sends the function and its arguments to other processes, and they cannot be pickled "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); create what cannot travel "
            "(files, locks, sockets) inside the function"
        ) from None


def _validate(
    function: object,
    ranks: int,
    args: Sequence[Any],
    backend: str | None,
    placement: str,
    cpus: float,
    gpus: float,
    max_restarts: int,
    start_timeout: float,
) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UsageError(
            f"ray.run starts ranks, and was called inside rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}; "
            "call it in a plain process, started with python"
        )
    if not callable(function):
        raise UsageError(f"ray.run runs a function, not {function!r}")
    if not isinstance(ranks, SupportsIndex) or isinstance(ranks, bool) or ranks.__index__() < 1:
        raise UsageError(f"ray.run needs a number of ranks of at least 1, not {ranks!r}")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise UsageError(f"ray.run: args={args!r}; expected a tuple of the function's arguments")
    if backend not in _BACKENDS:
        raise UsageError(f"ray.run: backend {backend!r}; use gloo or nccl, or None for automatic choice")
    if placement not in PLACEMENTS:
        raise UsageError(f"ray.run: placement={placement!r}; expected one of {', '.join(PLACEMENTS)}")
    for name, value in (("cpus_per_rank", cpus), ("gpus_per_rank", gpus), ("max_restarts", max_restarts)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise UsageError(f"ray.run: {name}={value!r}; expected a number of at least 0")
    if not isinstance(max_restarts, int):
        raise UsageError(f"ray.run: max_restarts={max_restarts!r}; expected a whole number")
    if not cpus and not gpus:
        raise UsageError("ray.run: cpus_per_rank and gpus_per_rank are both 0; Ray must reserve something for a rank")
    if not isinstance(start_timeout, (int, float)) or not start_timeout > 0:
        raise UsageError(f"ray.run: start_timeout={start_timeout!r} must be a number of seconds above 0")
