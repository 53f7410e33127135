"""The agent: the process that runs the ranks of one node for the launcher (under MPI: one rank).

It is started as `python -m unisono.launch.agent.node_agent` by the launcher itself, by ssh or by mpiexec, and receives
its commands over a Wire. When the connection breaks, the job is over and the agent kills everything that it started.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError, UsageError
from unisono.launch import environment
from unisono.launch.agent.connection import Reporter, StopListener, Stopped
from unisono.launch.job import CALL, MODULE, SCRIPT, Entrypoint, NodeJob
from unisono.launch.outcome import failure
from unisono.launch.store import program_rendezvous, secret
from unisono.launch.store.server import StoreServer
from unisono.launch.transport import job_folder, network
from unisono.launch.transport.wire import Message, Wire
from unisono.launch.worker import preload, process_tree, rank_main
from unisono.launch.worker.pool import GRACE, WorkerPool, folder_prefix


def main() -> int:
    keep = rank_main.open_descriptors()
    process_tree.adopt_orphans()
    about = _host_info()  # before connecting: the launcher's wait for the greeting is short
    wire = _wire()
    wire.send({"event": "hello", **about})
    listening: dict[str, socket.socket] = {}
    with contextlib.ExitStack() as until_end:
        while not wire.closed:
            for message in wire.receive():
                if message["do"] == "run":
                    return _run(NodeJob.from_json(message["job"]), wire, listening.get("store"), keep)
                wire.send(_answer(message, listening, until_end))
    return 0


def _wire() -> Wire:
    """A socket if mpiexec started this process; else stdin and stdout, which nothing else may use from then on."""
    target = os.environ.pop(environment.CONNECT, None)
    if target is not None:
        return _connect(*target.rsplit(" ", 2))
    wire = Wire(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return wire


def _connect(secret_file: str, port: str, addresses: str) -> Wire:
    os.environ[environment.SECRET_FILE] = secret_file
    key = secret.key_in(secret_file)
    for address in addresses.split(","):
        try:
            connection = socket.create_connection((address, int(port)), timeout=10)
        except OSError:
            continue
        connection.settimeout(None)
        fd = connection.detach()
        wire = Wire(fd, fd, key)
        while not wire.is_ready and not wire.closed:
            wire.read_once()
        return wire
    raise SystemExit(f"{socket.gethostname()} cannot connect to the launcher at any of {addresses}, port {port}")


def _host_info() -> dict[str, Any]:
    launcher, own = network.addresses_of_ssh()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "folders": folder_prefix(os.getpid()),
        "python": ".".join(map(str, sys.version_info[:3])),
        "unisono": sys.modules["unisono"].__version__,
        "torch": _version("torch"),
        "address": own,
        "launcher_address": launcher,
        "mpi": {name: os.environ[name] for name in _MPI_VARIABLES if name in os.environ},
    }


_LOOK = 5.0  # seconds between looks for files of MPI's shared memory, until one is found
_OTHERS_END = 4 * GRACE  # seconds in which the agents of other ranks end theirs, once the launcher has gone
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


def _answer(message: Message, listening: dict[str, socket.socket], until_end: contextlib.ExitStack) -> Message:
    """Answer a request of the preflight."""
    match message["do"]:
        case "keep":
            folder, drawn = Path(message["folder"]), bytes.fromhex(message["secret"])
            try:
                folder.mkdir(0o700)
                until_end.callback(shutil.rmtree, folder, ignore_errors=True)
                secret.write(folder, drawn)
            except FileExistsError:
                return {"event": "kept", "problem": _not_kept(folder, drawn)}
            except OSError as error:
                return {"event": "kept", "problem": f"cannot keep the job's secret in {folder}: {error.strerror}"}
            return {"event": "kept", "problem": ""}
        case "reserve":
            listening["program"] = network.reserve_port()
            return {"event": "reserved", "port": listening["program"].getsockname()[1]}
        case "check":
            program = {**message["program"], "args": tuple(message["program"]["args"])}
            return {"event": "checked", "problem": _problem(Entrypoint(**program))}
        case "listen":
            try:
                server = network.listen_at(message["address"], message["port"])
            except OSError as error:
                return {"event": "listening", "problem": os.strerror(error.errno or 0)}
            listening[message["name"]] = server
            return {"event": "listening", "port": server.getsockname()[1]}
        case "probe":
            found = [network.reach(address, port, message["timeout"]) for address, port in message["targets"]]
            return {"event": "probed", "found": found}
    raise AssertionError(f"unknown message {message!r}")


def _not_kept(folder: Path, drawn: bytes) -> str:
    """Why the job's secret is not there, "" if it is: hosts may have one folder for temporary files."""
    deadline = time.monotonic() + 5
    while True:
        try:
            if secret.key_in(folder / "secret") == secret.key_of(drawn):
                return ""
            return f"cannot keep the job's secret in {folder}: File exists"
        except UsageError as error:  # the other host has not written it yet
            if time.monotonic() > deadline:
                return f"cannot keep the job's secret in {folder}: {error}"
            time.sleep(0.02)


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
    if job.secret:
        pool.share_secret(bytes.fromhex(job.secret))
    listener = StopListener(wire, pool)
    problem, is_stopped = None, False
    segments: set[str] = set()
    try:
        if job.local_world:  # under mpiexec, which numbers and starts the ranks: one rank, no rendezvous
            _run_mpi_rank(job, pool, reporter, server, segments)
        else:
            _run_elastic(job, pool, reporter, server, listener)
    except Stopped:
        is_stopped, since = True, time.monotonic()
        if job.local_world:
            rank_main.remove_files(segments | _mpi_segments(pool))  # ranks that still use them keep them
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
    stopped = _stopped(pool, listener, job.host)
    pool.close()
    process_tree.sweep(os.getpid())
    rank_main.remove_files(segments)
    is_heard = reporter.ended(codes, problem, stopped)
    if job.local_world and not is_stopped:
        _await_launcher_close(wire)
    elif job.local_world and not is_heard:  # as below, where nobody would end what the others have left
        time.sleep(max(0.0, since + _OTHERS_END - time.monotonic()))
        job_folder.remove_without_launcher(Path(os.environ[environment.SECRET_FILE]).parent, patience=GRACE)
    if not listener.keeps_memory:
        shutil.rmtree(job.environment.get(environment.MEMORY, ""), ignore_errors=True)
    return 0


def _stopped(pool: WorkerPool, listener: StopListener, host: str) -> tuple[int, str, bool] | None:
    """Of ranks that ended early because they or this process were asked to: as Reporter.ended reports it. Other agents
    wait for one that has gone, also if its ranks have saved."""
    noted, received = pool.stop_note(), listener.received
    if received is None:
        return None if noted is None else (noted[0], f"stopped by SIGTERM to a rank: {noted[1]}", False)
    if noted is None:
        return 128 + received, f"{received.name} was sent to the agent on host {host}; its ranks have ended", True
    code = failure.RESUMABLE if noted[0] == failure.RESUMABLE else 128 + received
    return code, f"stopped by {received.name} to the agent on host {host}: {noted[1]}", True


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
    key = secret.key_of(bytes.fromhex(job.secret)) if job.secret else secret.of_job()
    store = elastic.open_store(job, key, server)
    if preload.is_wanted(job.program, job.environment):
        preload.load()
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
    if job.encrypt:
        job.environment["GLOO_SOCKET_IFNAME"] = "lo"
        return
    if "GLOO_SOCKET_IFNAME" in os.environ or "GLOO_SOCKET_IFNAME" in job.environment:
        return
    interface = network.interface_of(network.source_address(job.address))
    if interface is not None:
        job.environment["GLOO_SOCKET_IFNAME"] = interface


def _mpi_segments(pool: WorkerPool) -> set[str]:
    return {path for worker in pool.running for path in rank_main.mpi_segments(worker.pid)}


def _run_mpi_rank(
    job: NodeJob, pool: WorkerPool, reporter: Reporter, listening: socket.socket | None, segments: set[str]
) -> None:
    """listening: on the first host, for the job's store, which this process serves. `segments` is filled."""
    variables = job.rank_variables(job.first_rank, job.local_rank, job.local_world, job.program_port, job.attempt)
    variables |= program_rendezvous.variables(job.address, job.port, job.program_port)
    reporter.started(job.attempt)
    pool.start(job.first_rank, variables, lambda results: rank_main.run(job.program, results))
    key = secret.of_job()
    server = StoreServer(listening, key) if listening is not None and key is not None else None
    pool.release()
    next_look = time.monotonic() + _LOOK
    while pool.running and not pool.failures():
        pool.pump(0.1)
        if server is not None:
            reporter.refused(server.refused, server.first_refused)
        if not segments and time.monotonic() > next_look:
            segments |= _mpi_segments(pool)
            if segments:
                job_folder.note_shared_memory(pool.folder, segments)
            next_look = time.monotonic() + _LOOK
    if pool.failures():
        segments |= _mpi_segments(pool)  # a rank that is stopped while it ends does not remove them
        reporter.failed(pool, job.attempt, restarting=False)
        pool.stop()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
