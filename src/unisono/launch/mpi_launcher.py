"""A job over MPI: mpiexec starts one agent a rank, and each agent connects to the launcher.

Output, failures and the end of the job are then handled as without MPI, for every flavour of mpiexec.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from unisono.errors import LaunchError
from unisono.launch import environment
from unisono.launch.console import Console
from unisono.launch.job import LaunchJob
from unisono.launch.outcome.monitor import Monitor, Outcome, ending
from unisono.launch.transport import mpiexec, network, preflight
from unisono.launch.transport.link import AgentLink, AgentLinks, agent_command, end_group
from unisono.launch.transport.wire import Message, Wire

BACKEND = "mpi"
_GREETING_TIMEOUT = 5.0


def run(job: LaunchJob, console: Console) -> Outcome:
    """Run the job to its end, restarts included."""
    address = _check_hosts(job, console) if job.elsewhere else "127.0.0.1"
    for attempt in range(job.max_restarts + 1):
        outcome = _attempt(job, console, attempt, address)
        if not outcome.error or outcome.is_permanent or attempt == job.max_restarts:
            break
        console.message(f"restart {attempt + 1} of {job.max_restarts}: {outcome.summary}")
    return outcome


def _check_hosts(job: LaunchJob, console: Console) -> str | None:
    """Run the preflight; return the launcher's address as the other hosts see it."""
    links = AgentLinks()
    with ending(Monitor(job, links, console)):
        preflight.gather(job, links, console.message)
        return preflight.launcher_address(links)


def _attempt(job: LaunchJob, console: Console, attempt: int, address: str | None) -> Outcome:
    links = AgentLinks()
    folder = Path(tempfile.mkdtemp(prefix="unisono-mpi-"))
    monitor = Monitor(job, links, console, lambda link: (folder / "log").read_text(errors="replace"))
    token = secrets.token_hex(16)
    server = network.listen("" if job.elsewhere else "127.0.0.1", 0)
    process = _start(job, console, folder, f"{token} {server.getsockname()[1]}", address)
    try:
        with ending(monitor):
            _admit(job, links, server, token, process, folder / "log")
            _assign_ranks(job, links, attempt)
            return monitor.until_end()
    finally:
        server.close()
        _end_mpiexec(process)
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    job: LaunchJob, console: Console, folder: Path, token_and_port: str, address: str | None
) -> subprocess.Popen[bytes]:
    """Start mpiexec. Its output goes to a file, and is shown only when no rank reports the cause of a failure."""
    tool = mpiexec.find()
    addresses = [address] if address else network.all_addresses()
    interface = network.interface_of(address) if address and job.elsewhere else None
    variables = dict(os.environ) | tool.variables(job.ssh, folder)
    if variables.get("PYTHONPATH"):  # mpiexec may start ranks in another directory
        variables["PYTHONPATH"] = environment.absolute_path(variables["PYTHONPATH"])
    variables[environment.CONNECT] = f"{token_and_port} {','.join(addresses)}"
    command = tool.command(job.placements, agent_command(job.python or sys.executable), interface)
    if job.verbose:
        console.message(f"{tool.flavour}: {shlex.join(command)}")
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
        )


def _admit(
    job: LaunchJob, links: AgentLinks, server: socket.socket, token: str, process: subprocess.Popen[bytes], log: Path
) -> None:
    """Wait until the agent of every rank has connected."""
    deadline = time.monotonic() + job.start_timeout
    server.settimeout(0.05)
    while len(links.all) < job.world:
        if process.poll() is not None or time.monotonic() > deadline:
            raise LaunchError(_why_mpiexec_failed(job, len(links.all), process, log))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        fd = connection.detach()
        wire = Wire(fd, fd)
        greeting = _greeting(wire)
        if len(greeting) < 2 or not hmac.compare_digest(str(greeting[0].get("token")), token):
            os.close(fd)
            continue
        link = AgentLink(greeting[1]["host"], wire)
        link.hello = greeting[1]
        links.add(link)


def _greeting(wire: Wire) -> list[Message]:
    """The first two messages of a connection, its token and its hello; fewer if it is no agent."""
    messages: list[Message] = []
    while len(messages) < 2 and not wire.closed:
        readable, _, _ = select.select([wire.read_fd], [], [], _GREETING_TIMEOUT)
        if not readable:
            break
        messages += wire.read_once()
    return messages


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
    for link in links:
        rank = link.ranks.start
        placement = job.placement_of(rank)
        local = _mpi_number(link, "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
        part = replace(
            job.on_node(job.placements.index(placement), link.host, link.ranks, address, port, attempt),
            local_rank=rank - placement.first_rank if local is None else local,
            local_world=placement.count,
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
