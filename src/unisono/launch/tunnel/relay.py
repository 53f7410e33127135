"""Bytes between a socket and a TLS connection, in both directions, by one thread.

The end of either side is the end of both, once what was read has arrived: gloo closes its connections as a whole. A
side that still sends is read until it has ended, since the kernel drops what is on its way from a socket that is closed
with unread bytes. A connection that was cut looks like one that has ended; to gloo, which knows the length of what it
awaits, both are a lost peer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl

_SIZE = 1 << 18  # bytes of a direction under way here; the kernel has as many on both sides

_Await = tuple[socket.socket, int]  # an end, and the event of select.poll that it is waited for with


def relay(plain: socket.socket, tls: ssl.SSLSocket) -> None:
    """Carry bytes until one of both has ended; close both."""
    with plain, tls:
        for end in (plain, tls):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
        there, back = _Direction(plain, tls), _Direction(tls, plain)
        while not there.is_over and not back.is_over:
            moved = there.move()
            if not (back.move() or moved):
                _wait([there.awaits, back.awaits])
        with contextlib.suppress(OSError, ValueError):
            if there.is_over:
                plain.close()
                with contextlib.suppress(OSError):  # it says that it ends, and would wait for the other to do so
                    tls.unwrap()
                _drain(socket.socket(fileno=tls.detach()))
            else:
                tls.close()
                _drain(plain)


def _wait(awaited: list[_Await]) -> None:
    events: dict[int, int] = {}
    for end, event in awaited:
        events[end.fileno()] = events.get(end.fileno(), 0) | event
    poll = select.poll()
    for fd, event in events.items():
        poll.register(fd, event)
    poll.poll()


def _drain(end: socket.socket) -> None:
    """Send the end, and read what still comes until the other side has ended, too."""
    with end:
        end.settimeout(None)
        end.shutdown(socket.SHUT_WR)
        while end.recv(_SIZE):
            pass


class _Direction:
    """Bytes from one end to the other, as many as can be moved without waiting."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source, self._target = source, target
        self._bytes = memoryview(bytearray(_SIZE))
        self._first = self._end = 0  # of those that have been read and not been sent
        self._has_ended = False
        self._is_refused = False  # the target takes nothing any more: what comes is read and dropped
        self._has_moved = False
        self.awaits: _Await = source, select.POLLIN

    @property
    def is_over(self) -> bool:
        return self._has_ended and self._first == self._end

    def move(self) -> bool:
        """Whether there was anything to do; if not, `awaits` says what for."""
        self._has_moved = False
        self._read()
        self._send()
        return self._has_moved

    def _read(self) -> None:
        try:
            while not self._has_ended and self._end < _SIZE:
                count = self._source.recv_into(self._bytes[self._end :])
                self._has_ended, self._has_moved = count == 0, True
                self._end += count
        except (BlockingIOError, ssl.SSLWantReadError):
            self.awaits = self._source, select.POLLIN
        except ssl.SSLWantWriteError:
            self.awaits = self._source, select.POLLOUT
        except OSError:
            self._has_ended = self._has_moved = True

    def _send(self) -> None:
        try:
            while self._first < self._end and not self._is_refused:
                self._first += self._target.send(self._bytes[self._first : self._end])
                self._has_moved = True
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.awaits = self._target, select.POLLOUT
        except ssl.SSLWantReadError:
            self.awaits = self._target, select.POLLIN
        except OSError:
            self._is_refused = self._has_moved = True
        if self._first == self._end or self._is_refused:
            self._first = self._end = 0
