"""The agent: the process that runs the ranks of one node for the launcher (under MPI: one rank).

It is started as `python -m unisono.launch.agent.node_agent` by the launcher itself, by ssh or by mpiexec, and receives
its commands over a Wire. When the connection breaks, the job is over and the agent kills everything that it started.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import time
import traceback
from importlib import metadata
from typing import Any

from unisono.errors import LaunchError
from unisono.launch import environment
from unisono.launch.agent.connection import Reporter, StopListener, Stopped
from unisono.launch.job import CALL, MODULE, SCRIPT, Entrypoint, NodeJob
from unisono.launch.transport import network
from unisono.launch.transport.wire import Message, Wire
from unisono.launch.worker import process_tree, rank_main
from unisono.launch.worker.pool import WorkerPool


def main() -> int:
    keep = rank_main.open_descriptors()
    process_tree.adopt_orphans()
    about = _host_info()  # before connecting: the launcher's wait for the greeting is short
    wire = _wire()
    wire.send({"event": "hello", **about})
    listening: dict[str, socket.socket] = {}
    while not wire.closed:
        for message in wire.receive():
            if message["do"] == "run":
                return _run(NodeJob.from_json(message["job"]), wire, listening.get("store"), keep)
            wire.send(_answer(message, listening))
    return 0


def _wire() -> Wire:
    """A socket if mpiexec started this process; else stdin and stdout, which nothing else may use from then on."""
    target = os.environ.pop(environment.CONNECT, None)
    if target is not None:
        return _connect(*target.split(" ", 2))
    wire = Wire(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return wire


def _connect(token: str, port: str, addresses: str) -> Wire:
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
    raise SystemExit(f"{socket.gethostname()} cannot connect to the launcher at any of {addresses}, port {port}")


def _host_info() -> dict[str, Any]:
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


_STORE_ERRORS = ("DistNetworkError", "DistStoreError")  # torch's, which may not be imported yet

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
    """Answer a request of the preflight."""
    match message["do"]:
        case "check":
            program = {**message["program"], "args": tuple(message["program"]["args"])}
            return {"event": "checked", "problem": _problem(Entrypoint(**program))}
        case "listen":
            try:
                server = network.listen(message["address"], message["port"])
            except OSError as error:
                return {"event": "listening", "problem": os.strerror(error.errno or 0)}
            listening[message["name"]] = server
            return {"event": "listening", "port": server.getsockname()[1]}
        case "probe":
            found = [network.reach(address, port, message["timeout"]) for address, port in message["targets"]]
            return {"event": "probed", "found": found}
    raise AssertionError(f"unknown message {message!r}")


def _problem(program: Entrypoint) -> str | None:
    if not os.path.isdir(program.directory):
        return f"the working directory {program.directory} does not exist"
    path = os.path.join(program.directory, program.target)
    if program.kind == SCRIPT and not os.path.isfile(path):
        return f"the script {path} does not exist"
    if program.kind == MODULE and not os.access(program.directory, os.X_OK):
        return f"the working directory {program.directory} cannot be entered"
    return None


def _run(job: NodeJob, wire: Wire, server: socket.socket | None, keep: set[int]) -> int:
    reporter = Reporter(wire)
    pool = WorkerPool(reporter.output, keep, with_results=job.program.kind == CALL, close=(wire.read_fd, wire.write_fd))
    listener = StopListener(wire, pool)
    problem, is_stopped = None, False
    try:
        if job.local_world:  # under mpiexec, which numbers and starts the ranks: one rank, no rendezvous
            if server is not None:
                server.close()  # it reserved the port for a store that rank 0 may open
            _run_mpi_rank(job, pool, reporter)
        else:
            _run_elastic(job, pool, reporter, server, listener)
    except Stopped:
        is_stopped = True
        listener.await_grace()
        pool.stop(listener.signal)
    except LaunchError as error:
        problem = str(error)
        pool.stop()
    except Exception as error:
        problem = traceback.format_exc()
        if job.start_timeout and job.node > 0 and type(error).__name__ in _STORE_ERRORS:
            problem = f"node 0 at {job.address} is gone, or has ended the job"
        pool.stop()
    listener.close()
    pool.drain()
    codes = {worker.rank: worker.code for worker in pool.workers.values()}
    pool.close()
    process_tree.sweep(os.getpid())
    reporter.ended(codes, problem)
    if job.local_world and not is_stopped:
        _await_launcher_close(wire)
    return 0


def _await_launcher_close(wire: Wire) -> None:
    """Wait until the launcher closes the connection, when all ranks have ended: MPICH's mpiexec (5.0) kills the other
    processes as soon as one of them ends, also after MPI_Finalize."""
    while not wire.closed:  # the thread of StopListener reads it
        time.sleep(0.02)


def _run_elastic(
    job: NodeJob, pool: WorkerPool, reporter: Reporter, server: socket.socket | None, listener: StopListener
) -> None:
    _limit_threads(job)
    from unisono.launch.agent import elastic

    _set_gloo_interface(job)
    store = elastic.open_store(job, None if server is None else server.detach())
    gc.collect()
    gc.freeze()  # ranks do not copy the pages that the collector would write to
    agent = elastic.Agent(job, pool, store, reporter)
    agent.before_shutdown = listener.await_grace
    listener.on_stop = lambda signum: setattr(agent, "stop_signal", signum)
    agent.run()


def _limit_threads(job: NodeJob) -> None:
    """Set OMP_NUM_THREADS before torch is loaded: Arm's library, in torch's oneDNN, keeps the number that it reads
    then, whatever number of threads a forked rank sets."""
    wanted = job.environment.get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))
    if wanted or job.count > 1:
        os.environ["OMP_NUM_THREADS"] = wanted or "1"


def _set_gloo_interface(job: NodeJob) -> None:
    """Name the network interface for gloo, which would look up the host's name to find it; that often fails."""
    if "GLOO_SOCKET_IFNAME" in os.environ or "GLOO_SOCKET_IFNAME" in job.environment:
        return
    interface = network.interface_of(network.source_address(job.address))
    if interface is not None:
        job.environment["GLOO_SOCKET_IFNAME"] = interface


def _run_mpi_rank(job: NodeJob, pool: WorkerPool, reporter: Reporter) -> None:
    variables = job.rank_variables(job.first_rank, job.local_rank, job.local_world, job.port, job.attempt)
    reporter.started(job.attempt)
    pool.start(job.first_rank, variables, lambda results: rank_main.run(job.program, results))
    pool.release()
    while pool.running and not pool.failures():
        pool.pump(0.1)
    if pool.failures():
        reporter.failed(pool, job.attempt, restarting=False)
        pool.stop()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
