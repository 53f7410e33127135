"""The launcher's connections to its agents: started here, started over ssh, or connecting under mpiexec."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from unisono.launch.transport import job_folder
from unisono.launch.transport.wire import Message, Wire

_ERRORS_KEPT = 1 << 16


class AgentLink:
    """The launcher's connection to one agent."""

    def __init__(self, host: str, wire: Wire, process: subprocess.Popen[bytes] | None = None) -> None:
        self.host = host
        self.wire = wire
        self.process = process
        self.hello: Message = {}
        self.ended: Message | None = None
        self.ranks: range = range(0)
        self.is_local = False
        self.errors = b""  # stderr of ssh, or of an agent that failed to start

    @property
    def is_closed(self) -> bool:
        return self.wire.closed

    @property
    def exit_code(self) -> int | None:
        if self.process is None:
            return None
        try:
            return self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return None


class AgentLinks:
    """The connections of all agents of a job."""

    def __init__(self) -> None:
        self.all: list[AgentLink] = []
        self._selector = selectors.DefaultSelector()

    def __iter__(self) -> Iterator[AgentLink]:
        return iter(self.all)

    def start(self, host: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> AgentLink:
        """Start an agent that communicates on stdin and stdout."""
        process = start_detached(command, environment, stdin=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        link = AgentLink(host, Wire(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())), process)
        process.stdin.close()
        process.stdout.close()
        os.set_blocking(process.stderr.fileno(), False)
        self._selector.register(process.stderr, selectors.EVENT_READ, link)
        self.add(link)
        return link

    def add(self, link: AgentLink) -> None:
        self.all.append(link)
        self._selector.register(link.wire.read_fd, selectors.EVENT_READ, link)

    def receive(self, timeout: float) -> list[tuple[AgentLink, Message]]:
        """Messages of agents within timeout; {"event": "closed"} for a connection that ended."""
        messages: list[tuple[AgentLink, Message]] = []
        if not self._selector.get_map():
            time.sleep(max(0.0, timeout))
            return messages
        for key, _ in self._selector.select(max(0.0, timeout)):
            link: AgentLink = key.data
            if key.fd != link.wire.read_fd:
                self._read_errors(link, key)
                continue
            messages += [(link, message) for message in link.wire.read_once()]
            if link.is_closed:
                self._selector.unregister(key.fd)
                self._read_errors_left(link)
                messages.append((link, {"event": "closed"}))
        return messages

    def request(
        self, requests: Iterable[tuple[AgentLink, Message]], event: str, deadline: float
    ) -> dict[AgentLink, Message]:
        """Send each agent its request; return the answers by the deadline ("closed" is one)."""
        open_links = set()
        for link, request in requests:
            link.wire.send(request)
            open_links.add(link)
        return self.await_event(open_links, event, deadline)

    def await_event(self, links: Iterable[AgentLink], event: str, deadline: float) -> dict[AgentLink, Message]:
        waiting = set(links)
        answers: dict[AgentLink, Message] = {link: {"event": "closed"} for link in waiting if link.is_closed}
        waiting -= set(answers)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for link, message in self.receive(min(left, 0.1)):
                if link in waiting and message["event"] in (event, "closed"):
                    answers[link] = message
                    waiting.discard(link)
        return answers

    def _read_errors(self, link: AgentLink, key: selectors.SelectorKey) -> None:
        try:
            data = os.read(key.fd, _ERRORS_KEPT)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(key.fileobj)
        link.errors = (link.errors + data)[-_ERRORS_KEPT:]

    def _read_errors_left(self, link: AgentLink) -> None:
        """The rest of stderr after the process has ended."""
        if link.process is None or link.process.stderr is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.process.wait(timeout=1)
        with contextlib.suppress(BlockingIOError, ValueError, OSError):
            while data := os.read(link.process.stderr.fileno(), _ERRORS_KEPT):
                link.errors = (link.errors + data)[-_ERRORS_KEPT:]

    def close_sending(self) -> None:
        """Close the connections: agents then end everything they started."""
        for link in self.all:
            if not link.is_closed:
                link.wire.close_sending()

    def close(self) -> None:
        """Close all file descriptors, and remove what agents of this host have left, if they were killed."""
        self._selector.close()
        for link in self.all:
            if link.is_local and "folders" in link.hello:
                for left in Path(tempfile.gettempdir()).glob(f"{link.hello['folders']}*"):
                    job_folder.remove(left)
            link.wire.close()
            if link.process is not None and link.process.stderr is not None:
                link.process.stderr.close()

    def kill(self) -> None:
        for link in self.all:
            if link.process is not None and link.process.poll() is None:
                end_group(link.process)


def start_detached(
    command: Sequence[str], environment: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C reaches the launcher alone."""
    return subprocess.Popen(
        list(command),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env=None if environment is None else dict(environment),
    )


def end_group(process: subprocess.Popen[bytes], signum: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signum)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)


def agent_command(python: str = sys.executable, module: str = "node_agent") -> list[str]:
    """With -P, so that no file in the working directory shadows a module that the agent needs."""
    return [python, "-P", "-m", f"unisono.launch.agent.{module}"]
