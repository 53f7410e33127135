"""Messages between the launcher and its agents: one JSON object a line, over pipes, ssh or a socket.

No message passes through a shell. Bytes that are not UTF-8 are kept as surrogate escapes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from typing import Any

Message = dict[str, Any]
_CHUNK = 1 << 16


class Wire:
    """One end of a connection. `closed` is True after the other end has closed."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.closed = False
        self._pending = b""
        self._sending = threading.Lock()

    def send(self, message: Message) -> bool:
        """False if the connection is closed."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            with self._sending:
                while data:
                    data = data[os.write(self.write_fd, data) :]
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        """Received messages; blocks until there is one. At the end of the stream: an empty list and `closed`."""
        messages: list[Message] = []
        while not messages and not self.closed:
            messages = self.read_once()
        return messages

    def is_silent(self, seconds: float | None) -> bool:
        """Whether nothing arrives within so many seconds (None: no limit)."""
        try:
            return not select.select([self.read_fd], [], [], seconds)[0]
        except (OSError, ValueError):
            return False  # closed: the next read reports it

    def read_once(self) -> list[Message]:
        """The complete messages after one read, which blocks unless data is available."""
        try:
            data = os.read(self.read_fd, _CHUNK)
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [message for line in lines if (message := _decode(line)) is not None]

    def close_sending(self) -> None:
        """Close the sending direction: the other end reads the end of the stream, and can still send."""
        with self._sending:
            if self.write_fd == self.read_fd:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.write_fd)) as connection:
                    connection.shutdown(socket.SHUT_WR)
            elif self.write_fd >= 0:
                os.close(self.write_fd)
                self.write_fd = -1

    def close(self) -> None:
        for fd in {self.read_fd, self.write_fd} - {-1}:
            os.close(fd)
        self.read_fd = self.write_fd = -1
        self.closed = True


def _decode(line: bytes) -> Message | None:
    """None for other output: a login script on a remote host may print before the agent starts."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
