"""launch(): preflight, start over elastic agents or mpiexec, monitor, end.

With `--elastic`, a job that has lost hosts is started again on those that remain, and again when they are back. Where a
scheduler has started one launcher a node (`scheduler`), each runs its own node's ranks.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from unisono.errors import PreflightError
from unisono.launch import environment, hosts, mpi_launcher
from unisono.launch.console import Console
from unisono.launch.host_return import ReturningHosts
from unisono.launch.job import LaunchJob
from unisono.launch.outcome.monitor import Interrupted, Monitor, Outcome, ending
from unisono.launch.scheduler import NodeGroup
from unisono.launch.store import secret as job_secret
from unisono.launch.transport import preflight, ssh
from unisono.launch.transport.link import AgentLinks

Causes = Mapping[str, str]  # by host: why it counts as lost


def launch(job: LaunchJob, console: Console) -> Outcome:
    """Run the job to its end. LaunchError if it cannot be started, Interrupted if a signal ended it."""
    memory = environment.memory_folder(secrets.token_hex(8))
    job = replace(job, environment={**job.environment, environment.MEMORY: memory})
    with _interruptible(), _removed_at_the_end(memory):
        if job.backend == mpi_launcher.BACKEND:
            return mpi_launcher.run(job, console)
        if job.group is not None:
            return _run_node(job, job.group, console)
        return _run_elastic(job, console)


def _run_elastic(job: LaunchJob, console: Console) -> Outcome:
    """Agents restart their ranks themselves. A new agent takes the place of one that was lost on this host; after the
    loss of another host, new agents are started on those that remain, and after its return on all of them."""
    full, returning = job, ReturningHosts(job)
    outcome = _attempt(job, console, 0, returning)
    while outcome.has_returned or _may_restart(job, outcome):
        attempt = outcome.attempt + 1
        if outcome.has_returned:
            back = returning.take()
            remaining = with_hosts(job, full, back)
            change = describe_return(back, remaining)
        else:
            gone = {name: cause for name, cause in outcome.lost_hosts.items() if not _is_here(job, name, outcome)}
            returning.lose(gone)
            remaining = without_hosts(job, gone)
            if refusal := why_not_continue(job, remaining, attempt):
                return replace(outcome, error=f"{outcome.error}\n{refusal}")
            change = describe_restart(outcome.lost_hosts, remaining, attempt)
        console.flush()
        console.message(change)
        job = remaining
        try:
            outcome = _attempt(job, console, attempt, returning)
        except PreflightError as error:  # more hosts are lost; no restart was used
            outcome = Outcome(1, str(error), lost_hosts=error.causes, is_permanent=True, attempt=attempt - 1)
    return outcome


def _may_restart(job: LaunchJob, outcome: Outcome) -> bool:
    if not job.elastic:
        return job.max_restarts > 0 and all(_is_here(job, name, outcome) for name in outcome.lost_hosts or [""])
    return bool(outcome.lost_hosts)


def _is_here(job: LaunchJob, name: str, outcome: Outcome) -> bool:
    """Whether it is this very host, whose agent was lost but which can start another."""
    return not outcome.is_permanent and any(host.name == name and host.is_local for host in job.hosts)


def _attempt(job: LaunchJob, console: Console, attempt: int, returning: ReturningHosts) -> Outcome:
    links = AgentLinks()
    with returning.asked() as has_returned:
        monitor = Monitor(job, links, console, attempt=attempt, has_returned=has_returned)
        with ending(monitor):
            preflight.gather(job, links, console.message)
            master = links.all[0]
            address = preflight.addresses(links)[master]
            port = preflight.open_store_port(job, links, master, address)
            preflight.require_reach(links, master, address, port)
            secret = job_secret.draw().hex()
            for node, link in enumerate(links):
                part = replace(job.on_node(node, link.host, link.ranks, address, port, attempt), secret=secret)
                link.wire.send({"do": "run", "job": part.to_json()})
            with ssh.keepalive(links):
                return monitor.until_end()


def _run_node(job: LaunchJob, group: NodeGroup, console: Console) -> Outcome:
    """The ranks of this node; a scheduler starts the launchers of the others, whose agents meet at node 0's store."""
    links = AgentLinks()
    monitor = Monitor(job, links, console)
    with ending(monitor):
        preflight.gather(job, links, console.message)
        link = links.all[0]
        port = group.port
        if group.node == 0:
            port = preflight.open_store_port(replace(job, master_port=port), links, link, group.address)
        part = job.on_node(group.node, group.host, link.ranks, group.address, port, 0)
        if group.nodes == 1:  # the launchers of several share none, unless the user names a file
            part = replace(part, secret=job_secret.draw().hex())
        link.wire.send({"do": "run", "job": part.to_json()})
        return monitor.until_end()


def without_hosts(job: LaunchJob, lost: Causes) -> LaunchJob:
    """The job on the remaining hosts: with as many ranks as before if spare slots allow it, else fewer (or none)."""
    left = tuple(host for host in job.hosts if host.name not in lost)
    ranks = min(job.world, sum(host.slots for host in left))
    known = [name for name in job.environment.get(environment.LOST_HOSTS, "").split(",") if name]
    return replace(
        job,
        hosts=left,
        placements=tuple(hosts.assign_ranks(list(left), ranks)) if left else (),
        environment={**job.environment, environment.LOST_HOSTS: ",".join([*known, *lost])},
    )


def with_hosts(job: LaunchJob, full: LaunchJob, back: Collection[str]) -> LaunchJob:
    """The job on its hosts and those that are back, of those that it began with: with as many ranks as they allow."""
    there = {host.name for host in job.hosts} | set(back)
    known = [name for name in job.environment.get(environment.LOST_HOSTS, "").split(",") if name and name not in back]
    variables = {name: value for name, value in job.environment.items() if name != environment.LOST_HOSTS}
    named = tuple(host for host in full.hosts if host.name in there)
    ranks = min(full.world, sum(host.slots for host in named))
    return replace(
        job,
        hosts=named,
        placements=tuple(hosts.assign_ranks(list(named), ranks)),
        environment=variables | ({environment.LOST_HOSTS: ",".join(known)} if known else {}),
        returns=job.returns + 1,
    )


def why_not_continue(job: LaunchJob, remaining: LaunchJob, attempt: int) -> str:
    """Why the job does not continue on the remaining hosts; "" if it does."""
    if not remaining.world:
        return "no host is left to continue on"
    if attempt > job.max_restarts + job.returns:
        return f"{_ranks_of(remaining)} could continue, but --max-restarts {job.max_restarts} is used up"
    if remaining.world < job.min_ranks:
        return f"{_ranks_of(remaining)} are too few to continue: --min-ranks is {job.min_ranks}"
    return ""


def describe_restart(lost: Causes, remaining: LaunchJob, attempt: int) -> str:
    causes = ", ".join(f"host {host} is lost ({cause})" for host, cause in lost.items())
    counted = attempt - remaining.returns
    return f"{causes}; continuing with {_ranks_of(remaining)}: restart {counted} of {remaining.max_restarts}"


def describe_return(back: Collection[str], job: LaunchJob) -> str:
    hosts_are = "host" if len(back) == 1 else "hosts"
    return f"{hosts_are} {', '.join(back)} {'is' if len(back) == 1 else 'are'} back; continuing with {_ranks_of(job)}"


def _ranks_of(job: LaunchJob) -> str:
    names = ", ".join(placement.host.name for placement in job.placements)
    return f"{job.world} rank{'s' if job.world > 1 else ''} on {names}"


@contextmanager
def _removed_at_the_end(folder: str) -> Iterator[None]:
    """What ranks of this host have saved in memory; on other hosts, agents remove it."""
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM, SIGHUP and SIGQUIT raise Interrupted once; a second signal ends the launcher at once. Under
    `nohup` SIGHUP stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
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
