"""Heartbeat: notices agents that do not answer although their connection stands: stopped by a signal, or stuck.

An agent's thread answers each ping. A launcher that was suspended itself begins to count anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.launch import environment
from unisono.launch.job import LaunchJob
from unisono.launch.transport.link import AgentLink, AgentLinks
from unisono.launch.worker import process_tree

_PERIOD = 2.0  # seconds between pings
_NOTICE = 5.0  # seconds of silence after which a message says so
_UNPROVED = 60.0  # seconds that an agent gets at least where nothing shows that it was stopped: its host may be busy


class Heartbeat:
    def __init__(self, job: LaunchJob, links: AgentLinks, message: Callable[[str], None]) -> None:
        self.timeout = float(job.environment.get(environment.TIMEOUT, environment.DEFAULT_TIMEOUT))
        self._links = links
        self._message = message
        self._heard: dict[AgentLink, float] = {}
        self._noticed: set[AgentLink] = set()
        self._next = self._looked = 0.0

    def answered(self, link: AgentLink) -> None:
        self._heard[link] = time.monotonic()
        if link in self._noticed:
            self._noticed.discard(link)
            self._message(f"{describe(link)} answers again")

    def silent(self) -> str:
        """A sentence on the first agent that has been silent for too long; "" if there is none."""
        now = time.monotonic()
        if now > self._looked + _PERIOD + _NOTICE:
            self._heard.clear()
        self._looked = now
        if now < self._next:
            return ""
        self._next = now + _PERIOD
        for link in self._links:
            if link.ended is None and (sentence := self._look(link, now - self._heard.setdefault(link, now))):
                return sentence
        return ""

    def _look(self, link: AgentLink, seconds: float) -> str:
        link.wire.send({"do": "ping"})
        if seconds < min(_NOTICE, self.timeout):
            return ""
        is_stopped = link.is_local and process_tree.state(link.hello.get("pid", 0)) in process_tree.STOPPED
        if seconds >= (self.timeout if is_stopped else max(self.timeout, _UNPROVED)):
            state = "has been stopped (by SIGSTOP, or in a debugger)" if is_stopped else "has not answered"
            return f"{describe(link)} {state} for {seconds:.0f} s; all ranks were ended"
        if is_stopped and link not in self._noticed:
            self._noticed.add(link)
            self._message(
                f"{describe(link)} has been stopped (by SIGSTOP, or in a debugger); the job ends when it does not go on"
                f" within {self.timeout:g} s"
            )
        return ""


def describe(link: AgentLink) -> str:
    ranks = ", ".join(map(str, link.ranks))
    return f"the agent of rank{'s' if len(link.ranks) > 1 else ''} {ranks} on host {link.host}"
