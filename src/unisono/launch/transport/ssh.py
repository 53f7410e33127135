"""Agents on other hosts: the ssh command line, keepalive messages, and the cause when no agent answers."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence

from unisono.errors import UsageError
from unisono.launch import environment
from unisono.launch.transport.link import AgentLink, agent_command

_PROBES = 3  # keepalive probes of ssh before a silent host counts as lost
_AGENT_FACTOR = 10  # an agent waits so many times longer for the launcher before it ends its ranks
# Message of ssh -> its meaning. The first match counts.
_CAUSES = (
    (r"could not resolve hostname", "its name does not resolve; check the spelling, DNS or /etc/hosts"),
    (r"connection refused", "ssh refused: no ssh server listens there"),
    (r"timed out|timeout", "ssh timed out: the host does not answer"),
    (r"no route to host|network is unreachable", "no network route to the host"),
    (
        r"host key verification failed",
        "its ssh host key is not known here; connect once by hand to accept it",
    ),
    (r"permission denied", "ssh key rejected: set up a key that logs in without a password (ssh-copy-id)"),
    (r"no module named ['\"]?unisono", "unisono is not installed for its python"),
)


def command(host: str, ssh: Sequence[str], python: str, timeout: float) -> list[str]:
    """The ssh command that starts an agent. It is the same for every job: the job itself is sent over stdin."""
    words = agent_command(python or sys.executable)
    path = os.environ.get("PYTHONPATH")
    if path:
        words = ["env", f"PYTHONPATH={environment.absolute_path(path)}", *words]
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, math.ceil(timeout))}", "-T"]
    interval = max(1, host_timeout() // _PROBES)
    options += ["-o", f"ServerAliveInterval={interval}", "-o", f"ServerAliveCountMax={_PROBES}"]
    return [*ssh, *options, "--", host, shlex.join(words)]


def host_timeout() -> int:
    """Seconds without an answer after which a host counts as lost."""
    given = os.environ.get(environment.HOST_TIMEOUT, "30")
    if not given.isdecimal() or int(given) < _PROBES:
        raise UsageError(f"{environment.HOST_TIMEOUT}={given}: expected whole seconds, at least {_PROBES}")
    return int(given)


@contextlib.contextmanager
def keepalive(links: Iterable[AgentLink]) -> Iterator[None]:
    """In the block, send keepalive messages to agents on other hosts.

    An agent that receives none for ten times the host timeout ends its ranks: the launcher counts it as lost by then.
    """
    remote = [link for link in links if not link.is_local]
    done = threading.Event()

    def send() -> None:
        while remote and not done.is_set():
            for link in remote:
                link.wire.send({"do": "keepalive", "seconds": _AGENT_FACTOR * host_timeout()})
            done.wait(host_timeout() / _PROBES)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
    finally:
        done.set()
        sender.join(timeout=1)


def cause(link: AgentLink, python: str) -> str:
    """Why the agent of this link did not answer."""
    stderr = link.errors.decode(errors="replace").strip()
    code = link.exit_code
    if code in (126, 127):
        return f"no python at {python or sys.executable} there; give its path with --python"
    for pattern, meaning in _CAUSES:
        if re.search(pattern, stderr, re.IGNORECASE):
            return meaning
    if code is None:
        return "no answer in time; raise --start-timeout if the host is only slow"
    last = stderr.splitlines()[-1] if stderr else "no message"
    return f"the agent ended with code {code}: {last}"
