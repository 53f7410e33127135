"""Runs a job: preflight, start over the elastic agents or over mpiexec, watch, end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from unisono.launch import mpijob, preflight
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
    links = Links()
    watch = Watch(job, links, console)
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
            )
            link.wire.send({"do": "run", "share": share.to_json()})
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
