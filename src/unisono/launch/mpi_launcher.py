"""A job over MPI: mpiexec starts one agent a rank, and each agent connects to the launcher.

Output, failures and the end of the job are then handled as without MPI, for every flavour of mpiexec.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from unisono.errors import LaunchError
from unisono.launch import environment
from unisono.launch.console import Console
from unisono.launch.job import LaunchJob
from unisono.launch.outcome.monitor import Monitor, Outcome, ending
from unisono.launch.store import secret as job_secret
from unisono.launch.transport import job_folder, mpiexec, network, preflight
from unisono.launch.transport.link import AgentLink, AgentLinks, agent_command, end_group
from unisono.launch.transport.wire import Message, Wire
from unisono.launch.worker import preload

BACKEND = "mpi"
_GREETING_TIMEOUT = 5.0  # seconds in which a connection must show that it is an agent's
_GREETING_LIMIT = 1 << 16  # bytes of a message of one that has not
_MOST_ARRIVING = 256  # connections that have not, beside those of the job's ranks


def run(job: LaunchJob, console: Console) -> Outcome:
    """Run the job to its end, restarts included."""
    with _prepared(job, console) as (address, secret_file, key):
        for attempt in range(job.max_restarts + 1):
            outcome = _attempt(job, console, attempt, address, secret_file, key)
            if not outcome.error or outcome.is_permanent or attempt == job.max_restarts:
                break
            console.message(f"restart {attempt + 1} of {job.max_restarts}: {outcome.summary}")
    return outcome


@contextlib.contextmanager
def _prepared(job: LaunchJob, console: Console) -> Iterator[tuple[str | None, Path, bytes]]:
    """The launcher's address as the other hosts see it, after the preflight, and the job's secret: in the block each
    host has it in a file of that path, and it stands for that key."""
    secret = job_secret.draw()
    key = job_secret.key_of(secret)
    if not job.elsewhere:
        with job_folder.made() as folder:
            yield "127.0.0.1", job_secret.write(folder, secret), key
        return
    folder = Path(tempfile.gettempdir()) / f"unisono-hosts-{secrets.token_hex(8)}"
    links = AgentLinks()
    monitor = Monitor(job, links, console)
    try:
        preflight.gather(job, links, console.message)
        preflight.keep_secret(job, links, folder, secret)
        yield preflight.launcher_address(links), folder / "secret", key
    finally:
        monitor.stop()
        monitor.close()


def _attempt(
    job: LaunchJob, console: Console, attempt: int, address: str | None, secret_file: Path, key: bytes
) -> Outcome:
    links = AgentLinks()
    with job_folder.made() if job.elsewhere else contextlib.nullcontext(secret_file.parent) as folder:
        monitor = Monitor(job, links, console, lambda link: (folder / "log").read_text(errors="replace"))
        server = network.listen_at((address or "") if job.elsewhere else "127.0.0.1", 0)
        process = _start(job, console, folder, f"{secret_file} {server.getsockname()[1]}", address)
        try:
            with ending(monitor):
                _admit(job, links, server, key, process, folder / "log", console)
                server.close()  # all ranks have greeted: nobody else is to come
                _assign_ranks(job, links, attempt)
                return monitor.until_end()
        finally:
            server.close()
            _end_mpiexec(process)


def _start(
    job: LaunchJob, console: Console, folder: Path, secret_and_port: str, address: str | None
) -> subprocess.Popen[bytes]:
    """Start mpiexec. Its output goes to a file, and is shown only when no rank reports the cause of a failure."""
    tool = mpiexec.find()
    addresses = [address] if address else network.all_addresses()
    interface = network.interface_of(address) if address and job.elsewhere else None
    variables = dict(os.environ) | tool.variables(job.ssh, folder, job.elsewhere)
    if variables.get("PYTHONPATH"):  # mpiexec may start ranks in another directory
        variables["PYTHONPATH"] = environment.absolute_path(variables["PYTHONPATH"])
    if "OMP_NUM_THREADS" in job.environment:  # torch is loaded before the agents have the ranks' variables
        variables["OMP_NUM_THREADS"] = job.environment["OMP_NUM_THREADS"]
    variables[environment.CONNECT] = f"{secret_and_port} {','.join(addresses)}"
    variables[environment.PRELOAD] = "1" if preload.is_wanted(job.program, job.environment) else ""
    command = tool.command(job.placements, agent_command(job.python or sys.executable, "preloaded"), interface)
    if job.verbose:
        console.message(f"{tool.flavour}: {shlex.join(command)}")
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
        )


def _admit(
    job: LaunchJob,
    links: AgentLinks,
    server: socket.socket,
    key: bytes,
    process: subprocess.Popen[bytes],
    log: Path,
    console: Console,
) -> None:
    """Wait until the agent of every rank has connected. Others may connect, too: none of them holds up an agent, and of
    too many that show nothing the oldest are closed."""
    deadline = time.monotonic() + job.start_timeout
    server.setblocking(False)
    arriving: dict[int, _Arrival] = {}  # the oldest first
    refused = 0
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)

        def settle(fd: int) -> None:
            nonlocal refused
            arrival = arriving.pop(fd)
            selector.unregister(fd)
            arrival.settle(links)
            if not arrival.is_welcome and (refused := refused + 1) == 1:
                console.message(
                    f"a connection from {arrival.who} to the launcher's port was closed: it did not prove that it "
                    "belongs to the job; others are counted"
                )

        try:
            while len(links.all) < job.world:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise LaunchError(_why_mpiexec_failed(job, len(links.all), process, log))
                for ready, _ in selector.select(0.05):
                    if ready.fileobj is not server:
                        arriving[ready.fd].read()
                    elif (arrival := _accept(server, key)) is not None:
                        arriving[arrival.wire.read_fd] = arrival
                        selector.register(arrival.wire.read_fd, selectors.EVENT_READ)
                for fd in [fd for fd, each in arriving.items() if each.is_welcome or each.is_refused]:
                    settle(fd)
                while len(arriving) > job.world + _MOST_ARRIVING:
                    settle(next(iter(arriving)))
        finally:
            for arrival in arriving.values():
                arrival.wire.close()
            if refused > 1:
                console.message(f"{refused} connections to the launcher's port were closed that did not belong to it")


class _Arrival:
    """A connection whose first message, a signed hello, has not arrived."""

    def __init__(self, wire: Wire, who: str) -> None:
        self.wire = wire
        self.who = who
        self._deadline = time.monotonic() + _GREETING_TIMEOUT
        self._messages: list[Message] = []

    def read(self) -> None:
        self._messages += self.wire.read_once()

    @property
    def is_refused(self) -> bool:
        return self.wire.unread > _GREETING_LIMIT or self.wire.closed or time.monotonic() > self._deadline

    @property
    def is_welcome(self) -> bool:
        return len(self._messages) >= 1

    def settle(self, links: AgentLinks) -> None:
        """Take the agent among the links of the job, or close the connection."""
        if not self.is_welcome:
            self.wire.close()
            return
        link = AgentLink(self._messages[0]["host"], self.wire)
        link.hello = self._messages[0]
        links.add(link)


def _accept(server: socket.socket, key: bytes) -> _Arrival | None:
    try:
        connection, address = server.accept()
    except OSError:  # it has gone again
        return None
    connection.settimeout(None)
    fd = connection.detach()
    return _Arrival(Wire(fd, fd, key, serves=True), str(address[0]))


def _why_mpiexec_failed(job: LaunchJob, arrived: int, process: subprocess.Popen[bytes], log: Path) -> str:
    output = log.read_text(errors="replace").strip()
    code = process.poll()
    ended = f"ended with code {code}" if code is not None else f"did not finish starting in {job.start_timeout:g} s"
    head = f"mpiexec {ended} when {arrived} of {job.world} ranks had started"
    return f"{head}:\n{output}" if output else f"{head} (it wrote nothing; raise --start-timeout if it is only slow)"


def _assign_ranks(job: LaunchJob, links: AgentLinks, attempt: int) -> None:
    """Send each agent the rank that mpiexec numbered it."""
    for link in links:
        rank = _mpi_number(link, "PMI_RANK", "OMPI_COMM_WORLD_RANK")
        if rank is None:
            raise LaunchError("mpiexec set no rank (neither PMI_RANK nor OMPI_COMM_WORLD_RANK)")
        placement = job.placement_of(rank)
        link.host, link.is_local = placement.host.name, placement.host.is_local
        link.ranks = range(rank, rank + 1)
    master = next(link for link in links if link.ranks.start == 0)
    address = preflight.addresses(links)[master] if job.several_hosts else "127.0.0.1"
    port = preflight.open_store_port(job, links, master, address)
    program_port = preflight.reserve_port(job, links, master)
    for link in links:
        rank = link.ranks.start
        placement = job.placement_of(rank)
        local = _mpi_number(link, "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
        part = replace(
            job.on_node(job.placements.index(placement), link.host, link.ranks, address, port, attempt),
            local_rank=rank - placement.first_rank if local is None else local,
            local_world=placement.count,
            program_port=program_port,
        )
        link.wire.send({"do": "run", "job": part.to_json()})


def _mpi_number(link: AgentLink, *names: str) -> int | None:
    variables = link.hello["mpi"]
    return next((int(variables[name]) for name in names if name in variables), None)


def _end_mpiexec(process: subprocess.Popen[bytes]) -> None:
    """It ends by itself after its ranks; if not, by SIGTERM, then SIGKILL."""
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        end_group(process, signal.SIGTERM)
        if process.poll() is None:
            end_group(process)
