"""Runs a job: preflight, start over the elastic agents or over mpiexec, watch, end."""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from unisono.errors import LaunchError
from unisono.launch import environment, mpiexec, network, preflight
from unisono.launch.console import Console
from unisono.launch.job import Job, Share
from unisono.launch.link import Link, Links, agent_command, end_group
from unisono.launch.watch import Outcome, Watch
from unisono.launch.wire import Wire

MPI = "mpi"


class Interrupted(Exception):
    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def launch(job: Job, console: Console) -> Outcome:
    """Run the job to its end. LaunchError when it cannot be started."""
    with _interruptible():
        if job.backend != MPI:
            return _over_elastic(job, console)
        attempt = 0
        while True:
            outcome = _over_mpi(job, console, attempt)
            attempt += 1
            if not outcome.restarting:
                return outcome
            first_line, *rest = outcome.told.splitlines()
            cause = f"{first_line} {rest[-1]}" if rest else first_line
            console.say(f"restart {attempt} of {job.max_restarts}: {cause}")


def _over_elastic(job: Job, console: Console) -> Outcome:
    links = Links()
    watch = Watch(job, links, console)
    with _ending(watch):
        preflight.gather(job, links, console.say)
        reached_at = preflight.addresses(links)
        if job.verbose and job.several_hosts:
            for line in preflight.matrix_lines(links, preflight.matrix(links, reached_at)):
                console.say(line)
        address = reached_at[links.all[0]]
        port = preflight.open_store_door(job, links, address)
        for node, link in enumerate(links):
            share = Share(
                program=job.program,
                host=link.host,
                node=node,
                nodes=len(links.all),
                first_rank=link.ranks.start,
                count=len(link.ranks),
                world=job.world,
                address=address,
                port=port,
                environment=job.environment,
                max_restarts=job.max_restarts,
            )
            link.wire.send({"do": "run", "share": share.to_json()})
        return watch.until_end()


def _over_mpi(job: Job, console: Console, attempt: int) -> Outcome:
    if attempt == 0 and any(not placement.host.is_local for placement in job.placements):
        _check_hosts(job, console)
    tool = mpiexec.find()
    links = Links()
    watch = Watch(job, links, console)
    folder = Path(tempfile.mkdtemp(prefix="unisono-mpi-"))
    token = secrets.token_hex(16)
    elsewhere = any(not placement.host.is_local for placement in job.placements)
    door = network.listen("" if elsewhere else "127.0.0.1", 0)
    addresses = network.all_addresses() if elsewhere else ["127.0.0.1"]
    variables = dict(os.environ) | tool.variables(job.ssh, folder)
    variables[environment.CONNECT] = f"{token} {door.getsockname()[1]} {','.join(addresses)}"
    command = tool.command(job.placements, agent_command(job.python or agent_command()[0]))
    if job.verbose and attempt == 0:
        console.say(f"{tool.flavour}: {' '.join(command)}")
    log = open(folder / "log", "wb+")  # mpiexec's own words: shown when no rank explains the failure
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
    )
    try:
        with _ending(watch):
            _admit(job, links, door, token, process, folder / "log")
            _share_out(job, links, attempt)
            outcome = watch.until_end()
            return replace(outcome, told=outcome.told)
    finally:
        door.close()
        _end_mpiexec(process)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _check_hosts(job: Job, console: Console) -> None:
    links = Links()
    with _ending(Watch(job, links, console)):
        preflight.gather(job, links, console.say)
        if job.verbose:
            reached_at = preflight.addresses(links)
            for line in preflight.matrix_lines(links, preflight.matrix(links, reached_at)):
                console.say(line)


def _admit(
    job: Job, links: Links, door: socket.socket, token: str, process: subprocess.Popen[bytes], log: Path
) -> None:
    """Wait until every rank's agent has called in."""
    deadline = time.monotonic() + job.start_timeout
    door.settimeout(0.05)
    while len(links.all) < job.world:
        if process.poll() is not None or time.monotonic() > deadline:
            raise LaunchError(_why_mpiexec_failed(job, len(links.all), process, log))
        try:
            connection, _ = door.accept()
        except TimeoutError:
            continue
        connection.settimeout(5)
        fd = connection.detach()
        wire = Wire(fd, fd)
        greeting = [message for _ in range(2) for message in wire.receive()][:2]
        if len(greeting) < 2 or not hmac.compare_digest(str(greeting[0].get("token")), token):
            os.close(fd)
            continue
        os.set_blocking(fd, True)
        link = Link(greeting[1]["host"], wire)
        link.hello = greeting[1]
        links.add(link)


def _why_mpiexec_failed(job: Job, arrived: int, process: subprocess.Popen[bytes], log: Path) -> str:
    said = log.read_text(errors="replace").strip()
    code = process.poll()
    ended = f"ended with code {code}" if code is not None else f"gave no sign in {job.start_timeout:g} s"
    head = f"mpiexec {ended} when {arrived} of {job.world} ranks had started"
    return f"{head}:\n{said}" if said else f"{head} (it wrote nothing; raise --start-timeout if it is only slow)"


def _share_out(job: Job, links: Links, attempt: int) -> None:
    """Tell each agent which rank it has: as mpiexec numbered it."""
    port = _free_port()
    hosts = [placement.host.name for placement in job.placements]
    address = "127.0.0.1" if not job.several_hosts else hosts[0]
    for link in links:
        told = link.hello["mpi"]
        rank = int(told.get("PMI_RANK", told.get("OMPI_COMM_WORLD_RANK", -1)))
        if rank < 0:
            raise LaunchError("mpiexec told its ranks no rank (neither PMI_RANK nor OMPI_COMM_WORLD_RANK)")
        placement = next(p for p in job.placements if p.first_rank <= rank < p.first_rank + p.count)
        local = told.get("MPI_LOCALRANKID", told.get("OMPI_COMM_WORLD_LOCAL_RANK"))
        link.host = placement.host.name
        link.ranks = range(rank, rank + 1)
        share = Share(
            program=job.program,
            host=placement.host.name,
            node=hosts.index(placement.host.name),
            nodes=len(hosts),
            first_rank=rank,
            count=1,
            world=job.world,
            address=address,
            port=port,
            environment=job.environment,
            max_restarts=job.max_restarts,
            attempt=attempt,
            local_rank=rank - placement.first_rank if local is None else int(local),
            local_world=placement.count,
        )
        link.wire.send({"do": "run", "share": share.to_json()})


def _free_port() -> int:
    with network.listen("127.0.0.1", 0) as door:
        return int(door.getsockname()[1])


def _end_mpiexec(process: subprocess.Popen[bytes]) -> None:
    """It ends by itself after its ranks; when it does not, ask, then kill."""
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        end_group(process, signal.SIGTERM)
        if process.poll() is None:
            end_group(process)


@contextmanager
def _ending(watch: Watch) -> Iterator[None]:
    """However the job ends, its agents end."""
    signum = None
    try:
        yield
    except Interrupted as interrupted:
        signum = interrupted.signum
        raise
    finally:
        watch.stop(signum)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Interrupted, once; a second one ends the launcher at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in signals}

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(signum)

    for signum in signals:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
