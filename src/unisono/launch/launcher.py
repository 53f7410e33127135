"""Runs a job: preflight, start over the elastic agents or over mpiexec, watch, end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from unisono.errors import PreflightError
from unisono.launch import mpijob, preflight, remote, survivors
from unisono.launch.console import Console
from unisono.launch.job import Job, Share
from unisono.launch.link import Links
from unisono.launch.watch import Interrupted, Outcome, Watch, ending


def launch(job: Job, console: Console) -> Outcome:
    """Run the job to its end. LaunchError when it cannot be started, Interrupted when a signal ended it."""
    with _interruptible():
        if job.backend == mpijob.BACKEND:
            return mpijob.run(job, console)
        return _over_elastic(job, console)


def _over_elastic(job: Job, console: Console) -> Outcome:
    """The agents restart their ranks by themselves; without a host that is gone only a new start goes on."""
    outcome = _attempt(job, console, 0)
    while job.elastic and outcome.gone:
        attempt = outcome.attempt + 1
        left = survivors.of(job, outcome.gone)
        refusal = survivors.why_not(job, left, attempt)
        if refusal:
            return replace(outcome, told=f"{outcome.told}\n{refusal}")
        console.flush()
        console.say(survivors.tell(outcome.gone, left, attempt))
        job = left
        outcome = _attempt_again(job, console, attempt)
    return outcome


def _attempt_again(job: Job, console: Console, attempt: int) -> Outcome:
    """As _attempt; that a host does not answer is an outcome, and no restart was used up by it."""
    try:
        return _attempt(job, console, attempt)
    except PreflightError as error:
        return Outcome(1, str(error), gone=error.causes, attempt=attempt - 1)


def _attempt(job: Job, console: Console, attempt: int) -> Outcome:
    links = Links()
    watch = Watch(job, links, console, attempt=attempt)
    with ending(watch):
        preflight.gather(job, links, console.say)
        reached_at = preflight.addresses(links)
        address = reached_at[links.all[0]]
        port = preflight.open_door(job, links, links.all[0], address)
        preflight.require_reach(links, links.all[0], address, port)
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
                attempt=attempt,
            )
            link.wire.send({"do": "run", "share": share.to_json()})
        with remote.heard(links):
            return watch.until_end()


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
