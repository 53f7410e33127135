"""Agents on other hosts: the ssh command line, and what went wrong when no agent answers."""

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
from unisono.launch.link import Link, agent_command

_ASKED = 3  # times that ssh asks a silent host for a word
_TRUST = 10  # so many times longer, a host that hears nothing waits before it ends its ranks
# What ssh says -> what it means. The first that fits counts.
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


def command(host: str, ssh: Sequence[str], python: str, patience: float) -> list[str]:
    """The ssh command that starts an agent. Its words are fixed; the job itself travels over stdin."""
    words = agent_command(python or sys.executable)
    path = os.environ.get("PYTHONPATH")
    if path:
        words = ["env", f"PYTHONPATH={environment.absolute_path(path)}", *words]
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, math.ceil(patience))}", "-T"]
    asked = max(1, silence() // _ASKED)  # a host that vanishes is noticed
    options += ["-o", f"ServerAliveInterval={asked}", "-o", f"ServerAliveCountMax={_ASKED}"]
    return [*ssh, *options, "--", host, shlex.join(words)]


def silence() -> int:
    """Seconds without a word after which a host counts as gone."""
    given = os.environ.get(environment.SILENCE, "30")
    if not given.isdecimal() or int(given) < _ASKED:
        raise UsageError(f"{environment.SILENCE}={given}: expected whole seconds, at least {_ASKED}")
    return int(given)


@contextlib.contextmanager
def heard(links: Iterable[Link]) -> Iterator[None]:
    """In the block, agents on other hosts hear every few seconds that the launcher is there.

    One that does not for ten times as long as a host may be silent ends its ranks: the launcher has given it up.
    """
    far = [link for link in links if not link.is_local]
    over = threading.Event()

    def tell() -> None:
        while far and not over.is_set():
            for link in far:
                link.wire.send({"do": "trust", "seconds": _TRUST * silence()})
            over.wait(silence() / _ASKED)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join(timeout=1)


def cause(link: Link, python: str) -> str:
    """Why the agent behind this link never spoke."""
    said = link.errors.decode(errors="replace").strip()
    code = link.exit_code
    if code in (126, 127):
        return f"no python at {python or sys.executable} there; give its path with --python"
    for pattern, meaning in _CAUSES:
        if re.search(pattern, said, re.IGNORECASE):
            return meaning
    if code is None:
        return "no answer in time; raise --start-timeout if the host is only slow"
    last = said.splitlines()[-1] if said else "no message"
    return f"the agent ended with code {code}: {last}"
