"""The agent's side of its host's tunnel: starts the process, introduces it to the others, sees whether it runs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError

_START = 60.0  # seconds for the process to start


class HostTunnel:
    def __init__(self, host: str, address: str, folder: Path) -> None:
        """Start the process, which listens on this address. Its files are in a folder below `folder`, which the caller
        removes. LaunchError if it cannot."""
        self._host = host
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self._line, theirs = socket.socketpair()  # no pipes: forked ranks keep those
        words = [sys.executable, "-P", "-m", "unisono.launch.tunnel.process"]
        words += [str(os.getpid()), str(self.folder), address]
        with theirs:
            self._process = subprocess.Popen(words, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._arrived = b""
        self._line.settimeout(_START)
        greeting = self._read()
        self.introduction = address, greeting["port"], greeting["certificate"], host

    def connect(self, node: int, store: tuple[str, int] | None, peers: Sequence[Sequence[Any]]) -> int:
        """Introduce it to the tunnels of all nodes. The port of a listener that leads to the job's store; 0 where this
        node itself has the `store`."""
        order = {"node": node, "store": store, "peers": peers}
        try:
            self._line.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            raise LaunchError(self._ended()) from None
        return int(self._read()["store"])

    def require_running(self) -> None:
        """LaunchError where it has ended, or cannot reach another."""
        if select.select([self._line], [], [], 0)[0]:
            self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._line.close()

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            while b"\n" not in self._arrived and (data := self._line.recv(1 << 16)):
                self._arrived += data
        text, newline, self._arrived = self._arrived.partition(b"\n")
        if not newline:
            raise LaunchError(self._ended())
        message: dict[str, Any] = json.loads(text)
        if "problem" in message:
            raise LaunchError(f"host {self._host}: {message['problem']}")
        return message

    def _ended(self) -> str:
        code = self._process.poll()
        return f"the tunnel of host {self._host} {'does not answer' if code is None else f'has ended (code {code})'}"
