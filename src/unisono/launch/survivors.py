"""What is left of an elastic job when hosts are gone, and how that is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unisono.launch import environment, hosts
from unisono.launch.job import Job

Causes = Mapping[str, str]  # why a host counts as gone, by its name


def of(job: Job, gone: Causes) -> Job:
    """The job on the hosts that are left: as many ranks as before where spare slots allow it, else fewer.

    It has no ranks where no host is left.
    """
    left = tuple(host for host in job.hosts if host.name not in gone)
    ranks = min(job.world, sum(host.slots for host in left))
    known = [name for name in job.environment.get(environment.GONE, "").split(",") if name]
    return replace(
        job,
        hosts=left,
        placements=tuple(hosts.place(list(left), ranks)) if left else (),
        environment={**job.environment, environment.GONE: ",".join([*known, *gone])},
    )


def why_not(job: Job, left: Job, attempt: int) -> str:
    """Why the job does not go on with what is left; nothing where it does."""
    if not left.world:
        return "no host is left to go on with"
    if attempt > job.max_restarts:
        return f"{_with(left)} could go on, but the job was restarted {attempt - 1} times already (--max-restarts)"
    if left.world < job.min_ranks:
        return f"{_with(left)} {'are' if left.world > 1 else 'is'} too few to go on: --min-ranks is {job.min_ranks}"
    return ""


def tell(gone: Causes, left: Job, attempt: int) -> str:
    """One line: what was lost, and with what the job goes on."""
    lost = [f"host {host} is gone ({cause})" for host, cause in gone.items()]
    return f"{', '.join(lost)}; going on with {_with(left)}: restart {attempt} of {left.max_restarts}"


def _with(job: Job) -> str:
    names = ", ".join(placement.host.name for placement in job.placements)
    return f"{job.world} rank{'s' if job.world > 1 else ''} on {names}"
