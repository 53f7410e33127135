"""Messages between the launcher and its agents: one JSON object a line, over pipes, ssh or a socket.

No message passes through a shell. Bytes that are not UTF-8 are kept as surrogate escapes. A socket takes anyone: there
each end first sends a line with its nonce, and every line after it is signed (store/session.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from typing import Any

from unisono.launch.store import session
from unisono.launch.store.session import Forged, Session

Message = dict[str, Any]
_CHUNK = 1 << 16


class Wire:
    """One end of a connection. `closed` is True after the other end has closed, or has sent what it did not sign."""

    def __init__(self, read_fd: int, write_fd: int, key: bytes | None = None, *, serves: bool = False) -> None:
        """key: with it messages are signed and verified, and none may be sent before `is_ready`; one end `serves`."""
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.closed = False
        self._pending = b""
        self._sending = threading.Lock()
        self._key = key
        self._serves = serves
        self._session: Session | None = None
        self._nonce = session.nonce()
        if key is not None:
            with contextlib.suppress(OSError):
                os.write(write_fd, self._nonce.hex().encode() + b"\n")

    @property
    def is_ready(self) -> bool:
        """Whether this end may send."""
        return self._key is None or self._session is not None

    def send(self, message: Message) -> bool:
        """False if the connection is closed."""
        line = json.dumps(message).encode()
        try:
            with self._sending:
                if self._session is not None:
                    line = self._session.sign(line).hex().encode() + b" " + line
                data = memoryview(line + b"\n")
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

    @property
    def unread(self) -> int:
        """Bytes of a message that has not arrived in full."""
        return len(self._pending)

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
        try:
            lines = [self._verified(line) for line in lines]
        except (Forged, ValueError):
            self.closed = True
            return []
        return [message for line in lines if (message := _decode(line)) is not None]

    def _verified(self, line: bytes) -> bytes:
        """A line without its signature. Raises Forged, or ValueError where it has none."""
        if self._key is None:
            return line
        if self._session is None:
            theirs = bytes.fromhex(line.decode())
            nonces = (self._nonce, theirs) if self._serves else (theirs, self._nonce)
            self._session = Session(self._key, *nonces, serves=self._serves)
            return b""
        signature, _, line = line.partition(b" ")
        self._session.verify(line, bytes.fromhex(signature.decode()))
        return line

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
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
