"""The agent: the process that runs one node's ranks for the launcher (under MPI: one rank).

It is started as `python -m unisono.launch.agent`, by the launcher itself, by ssh or by mpiexec, and is told
what to do through its wire. When the wire breaks, the job is over and everything below the agent is killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from types import FrameType
from typing import Any

from unisono.launch import environment, network, proctree, rank
from unisono.launch.crew import Crew
from unisono.launch.job import CALL, MODULE, SCRIPT, Program, Share
from unisono.launch.reporter import Reporter
from unisono.launch.wire import Message, Wire

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)  # the last is this process's own
HARD_STOP = 4.0  # seconds after which an agent that was told to stop kills all and goes


class Stopped(Exception):
    """The launcher wants the job to end."""


def main() -> int:
    keep = rank.open_descriptors()
    proctree.adopt_orphans()
    about = _about_this_host()  # first: a launcher that is called waits only so long for a word
    wire = _wire()
    wire.send({"event": "hello", **about})
    listening: dict[str, socket.socket] = {}
    while not wire.closed:
        for message in wire.receive():
            if message["do"] == "run":
                return _run(Share.from_json(message["share"]), wire, listening.get("store"), keep)
            wire.send(_answer(message, listening))
    return 0


def _wire() -> Wire:
    """Over a socket when mpiexec started us; else over stdin and stdout, which nothing else may use then."""
    told = os.environ.pop(environment.CONNECT, None)
    if told is not None:
        return _call_launcher(*told.split(" ", 2))
    wire = Wire(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return wire


def _call_launcher(token: str, port: str, addresses: str) -> Wire:
    for address in addresses.split(","):
        try:
            connection = socket.create_connection((address, int(port)), timeout=10)
        except OSError:
            continue
        connection.settimeout(None)
        fd = connection.detach()
        wire = Wire(fd, fd)
        wire.send({"token": token})
        return wire
    raise SystemExit(f"no way to the launcher at any of {addresses}, port {port}, from {socket.gethostname()}")


def _about_this_host() -> dict[str, Any]:
    launcher, own = network.addresses_of_ssh()
    return {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "unisono": sys.modules["unisono"].__version__,
        "torch": _version("torch"),
        "address": own,
        "launcher_address": launcher,
        "mpi": {name: os.environ[name] for name in _MPI_VARIABLES if name in os.environ},
    }


_MPI_VARIABLES = (
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _answer(message: Message, listening: dict[str, socket.socket]) -> Message:
    """Questions of the preflight."""
    match message["do"]:
        case "check":
            program = {**message["program"], "args": tuple(message["program"]["args"])}
            return {"event": "checked", "problem": _problem(Program(**program))}
        case "listen":
            try:
                door = network.listen(message["address"], message["port"])
            except OSError as error:
                return {"event": "listening", "problem": os.strerror(error.errno or 0)}
            listening[message["name"]] = door
            return {"event": "listening", "port": door.getsockname()[1]}
        case "probe":
            found = [network.reach(address, port, message["timeout"]) for address, port in message["targets"]]
            return {"event": "probed", "found": found}
    raise AssertionError(f"unknown message {message!r}")


def _problem(program: Program) -> str | None:
    if not os.path.isdir(program.directory):
        return f"the working directory {program.directory} is not there"
    path = os.path.join(program.directory, program.target)
    if program.kind == SCRIPT and not os.path.isfile(path):
        return f"the script {path} is not there"
    if program.kind == MODULE and not os.access(program.directory, os.X_OK):
        return f"the working directory {program.directory} cannot be entered"
    return None


def _run(share: Share, wire: Wire, door: socket.socket | None, keep: set[int]) -> int:
    reporter = Reporter(wire)
    wires = (wire.read_fd, wire.write_fd)
    crew = Crew(reporter.output, keep, with_results=share.program.kind == CALL, close=wires)
    lifeline = Lifeline(wire, crew)
    problem, is_stopped = None, False
    try:
        if share.local_world:  # under mpiexec, which numbers the ranks and starts them: one rank, no rendezvous
            if door is not None:
                door.close()  # its port was kept free for a store that rank 0 may open
            _supervise(share, crew, reporter)
        else:
            _conduct(share, crew, reporter, door, lifeline)
    except Stopped:
        is_stopped = True
        lifeline.take_time()
        crew.stop(lifeline.signal)
    except Exception:
        problem = traceback.format_exc()
        crew.stop()
    lifeline.retire()
    crew.drain()
    codes = {member.rank: member.code for member in crew.members.values()}
    crew.close()
    proctree.sweep(os.getpid())
    reporter.ended(codes, problem)
    if share.local_world and not is_stopped:
        _outlast_others(wire)
    return 0


def _outlast_others(wire: Wire) -> None:
    """Stay until the launcher hangs up, when all have ended: MPICH's mpiexec (5.0) kills the processes that are left as
    soon as one of them ends, after MPI_Finalize too."""
    while not wire.closed:  # the lifeline reads it
        time.sleep(0.02)


def _conduct(share: Share, crew: Crew, reporter: Reporter, door: socket.socket | None, lifeline: Lifeline) -> None:
    _limit_threads(share)
    from unisono.launch import elastic

    share = _with_interface(share)
    store = elastic.open_store(share, None if door is None else door.detach())
    gc.collect()
    gc.freeze()  # keeps the ranks from copying pages that the collector would touch
    agent = elastic.Agent(share, crew, store, reporter)
    agent.take_time = lifeline.take_time
    lifeline.on_stop = lambda signum: setattr(agent, "stop_signal", signum)
    agent.run()


def _limit_threads(share: Share) -> None:
    """Tell OpenMP, which reads it when torch is loaded: Arm's library, in torch's oneDNN, keeps to the number that it
    finds then, whatever number of threads a forked rank is given."""
    wanted = share.environment.get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))
    if wanted or share.count > 1:
        os.environ["OMP_NUM_THREADS"] = wanted or "1"


def _with_interface(share: Share) -> Share:
    """Gloo looks up the host's name to find its interface, which fails often: name the right one."""
    if "GLOO_SOCKET_IFNAME" in os.environ or "GLOO_SOCKET_IFNAME" in share.environment:
        return share
    interface = network.interface_of(network.source_address(share.address))
    if interface is not None:
        share.environment["GLOO_SOCKET_IFNAME"] = interface
    return share


def _supervise(share: Share, crew: Crew, reporter: Reporter) -> None:
    variables = environment.of_rank(
        rank=share.first_rank,
        world=share.world,
        local_rank=share.local_rank,
        local_world=share.local_world,
        node=share.node,
        nodes=share.nodes,
        address=share.address,
        port=share.port,
        host=share.host,
        attempt=share.attempt,
    )
    program = share.program
    reporter.started(share.attempt)
    crew.start(share.first_rank, {**share.environment, **variables}, lambda results: rank.run(program, results))
    crew.release()
    while crew.running and not crew.failures():
        crew.pump(0.1)
    if crew.failures():
        reporter.failed(crew, share.attempt, restarting=False)
        crew.stop()


class Lifeline:
    """Watches the wire while ranks run: the launcher's word, or its end, stops the job."""

    def __init__(self, wire: Wire, crew: Crew) -> None:
        self._wire = wire
        self._crew = crew
        self._retired = False
        self._patience = 0.0
        self._trust: float | None = None  # seconds without a word of the launcher after which the job is over
        self._is_asked = False  # to go, by SIGTERM to the launcher or to this agent
        self.signal = signal.SIGTERM
        self.on_stop: Callable[[signal.Signals], None] | None = None
        for signum in _ENDING:
            signal.signal(signum, self._interrupt)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._wire.closed:
            if self._wire.is_silent(self._trust):
                self._end_at_once()
            for message in self._wire.read_once():
                if message["do"] == "stop":
                    self.signal = signal.Signals(message["signal"])
                    self._is_asked = self.signal == signal.SIGTERM
                    self._stop()
                elif message["do"] == "trust":
                    self._trust = message["seconds"]
        self._stop()

    def _end_at_once(self) -> None:
        """The launcher has not been heard for long: its host, or the network, is gone, and nobody may be told."""
        if not self._retired:
            self._crew.kill_all()
            os._exit(1)

    def _stop(self) -> None:
        if self._retired:
            return
        if self.on_stop is not None:
            self.on_stop(self.signal)
        self._patience = self._crew.patience if self._is_asked else 0.0
        self._wire.send({"event": "patience", "seconds": self._patience})
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(self._patience + HARD_STOP)
        if not self._retired:
            self._crew.kill_all()
            os._exit(1)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)
        if signum == signal.SIGTERM:
            self._is_asked = True
            self._patience = self._crew.patience
        raise Stopped

    def take_time(self) -> None:
        """Let ranks that asked for patience end by themselves, where SIGTERM is why they must."""
        if self._is_asked and self._patience:
            self._crew.leave_in_peace(self._patience)

    def retire(self) -> None:
        self._retired = True
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
