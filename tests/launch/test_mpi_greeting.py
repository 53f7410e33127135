"""The MPI launcher's port: agents get in, whoever else connects does not, and nobody is held up."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.errors import LaunchError
from unisono.launch import mpi_launcher
from unisono.launch.hosts import LOCAL, Host, Placement
from unisono.launch.job import SCRIPT, Entrypoint, LaunchJob
from unisono.launch.transport import network
from unisono.launch.transport.link import AgentLinks
from unisono.launch.transport.wire import Wire

KEY = b"k" * 32


def _agent(port: int, key: bytes = KEY, host: str = "a") -> threading.Thread:
    """An agent that connects, greets and waits until the launcher has closed the connection."""

    def connect() -> None:
        connection = socket.create_connection(("127.0.0.1", port))
        wire = Wire(connection.fileno(), connection.fileno(), key)
        while not wire.is_ready and not wire.closed:
            wire.read_once()
        wire.send({"host": host})
        wire.receive()
        connection.close()

    agent = threading.Thread(target=connect, daemon=True)
    agent.start()
    return agent


@pytest.fixture
def mpiexec() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def _job(ranks: int, start_timeout: float = 60.0) -> LaunchJob:
    host = Host(LOCAL, ranks)
    program = Entrypoint(SCRIPT, "x.py")
    return LaunchJob(program, (Placement(host, 0, ranks),), start_timeout=start_timeout)


def _admitted(
    job: LaunchJob, server: socket.socket, mpiexec: subprocess.Popen[bytes], log: Path, shown: list[str] | None = None
) -> AgentLinks:
    links = AgentLinks()
    log.touch()
    console: Any = SimpleNamespace(message=(shown if shown is not None else list[str]()).append)
    mpi_launcher._admit(job, links, server, KEY, mpiexec, log, console)
    return links


def test_of_too_many_that_prove_nothing_the_oldest_are_closed(
    mpiexec: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are counted, and reported once. Those that are left are closed with the port."""
    monkeypatch.setattr(mpi_launcher, "_GREETING_TIMEOUT", 1e9)
    monkeypatch.setattr(mpi_launcher, "_MOST_ARRIVING", 10)
    server = network.listen("127.0.0.1", 0)
    silent = [socket.create_connection(server.getsockname()) for _ in range(50)]
    agents = [_agent(server.getsockname()[1], host=name) for name in "ab"]
    shown: list[str] = []
    links = _admitted(_job(2), server, mpiexec, tmp_path / "log", shown)
    assert {link.hello["host"] for link in links} == {"a", "b"}
    assert shown[0].startswith("a connection from 127.0.0.1 to the launcher's port was closed")
    assert re.fullmatch(r"(3[89]|40|41) connections to the launcher's port were closed .*", shown[1]), shown
    assert len(shown) == 2
    for each in silent:
        each.settimeout(30)
        assert len(each.makefile("rb").read()) == 65  # its nonce; then it was closed
        each.close()
    links.close()
    for agent in agents:
        agent.join(60)
    server.close()


def test_unauthenticated_connections_hold_nobody_up(
    mpiexec: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They have come first, they stay, and no time limit ends them here."""
    monkeypatch.setattr(mpi_launcher, "_GREETING_TIMEOUT", 1e9)
    server = network.listen("127.0.0.1", 0)
    port = server.getsockname()[1]
    silent, slow, wrong, deep = (socket.create_connection(("127.0.0.1", port)) for _ in range(4))
    slow.sendall(b"0123456789abcdef")
    wrong.sendall(bytes(32).hex().encode() + b"\n" + bytes(32).hex().encode() + b' {"host": "c"}\n')
    deep.sendall(b"[" * 60000)
    agents = [_agent(port, host=name) for name in "ab"]
    links = _admitted(_job(2), server, mpiexec, tmp_path / "log")
    assert {link.hello["host"] for link in links} == {"a", "b"}
    wrong.settimeout(30)
    assert len(wrong.makefile("rb").read()) == 65  # the launcher's nonce; then it has closed the connection at once
    links.close()
    for agent in agents:
        agent.join(60)
    for each in (silent, slow, wrong, deep, server):
        each.close()


def test_too_long_a_greeting_is_cut_off(mpiexec: subprocess.Popen[bytes], tmp_path: Path) -> None:
    server = network.listen("127.0.0.1", 0)
    flood = socket.create_connection(server.getsockname())
    flood.settimeout(60)

    def pour() -> None:
        with flood, contextlib.suppress(OSError):  # reset, or a broken pipe
            while True:
                flood.sendall(b"x" * 65536)
        agent.append(_agent(server.getsockname()[1]))

    agent: list[threading.Thread] = []
    pouring = threading.Thread(target=pour)
    pouring.start()
    links = _admitted(_job(1), server, mpiexec, tmp_path / "log")  # the agent comes after the flood was cut off
    pouring.join()
    assert len(links.all) == 1
    links.close()
    agent[0].join(60)
    server.close()


def test_without_agents_the_start_ends(mpiexec: subprocess.Popen[bytes], tmp_path: Path) -> None:
    server = network.listen("127.0.0.1", 0)
    for _ in range(3):
        _agent(server.getsockname()[1], key=b"another")
    with pytest.raises(LaunchError, match="0 of 1 ranks had started"):
        _admitted(_job(1, start_timeout=1.0), server, mpiexec, tmp_path / "log")
    server.close()
