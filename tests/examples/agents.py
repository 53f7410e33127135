"""The launcher's own agents, forked from this process, which has imported torch already, instead of from a shell.

An agent started afresh spends two seconds importing torch; nothing else differs.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.processes import become
from unisono.launch import agent, link, proctree


def fork_agents() -> None:
    """From here on, the launcher in this process forks its agents on this host."""
    start = link.start_detached

    def forked(command: Sequence[str], environment: Mapping[str, str] | None = None, stdin: int = -3) -> Any:
        if list(command) == link.agent_command():
            return ForkedAgent(environment)
        return start(command, environment, stdin)

    link.start_detached = forked


class ForkedAgent:
    """What the launcher wants of a subprocess.Popen, for a process that was forked."""

    def __init__(self, environment: Mapping[str, str] | None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pipes = [os.pipe(), os.pipe(), os.pipe()]
        inner, outer = [pipes[0][0], pipes[1][1], pipes[2][1]], [pipes[0][1], pipes[1][0], pipes[2][0]]
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            proctree.die_with_parent(parent)
            for target, fd in enumerate(inner):
                os.dup2(fd, target)
            for fd in (*inner, *outer):
                os.close(fd)
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            become(lambda: sys.exit(agent.main()))
        for fd in inner:
            os.close(fd)
        self.stdin, self.stdout, self.stderr = (io.FileIO(fd, mode) for fd, mode in zip(outer, "wrr", strict=True))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the launcher's sweep has collected it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("agent", timeout)
            time.sleep(0.005)
        return code
