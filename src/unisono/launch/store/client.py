"""The client of a job's key-value store: torch's Store interface over a connection that both ends have proved.

torch's own TCPStore serves anyone who reaches its port: whoever writes another rank's address there, or a report, is
believed. Process groups take a Store that is written in Python as well.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono.launch.store import session
from unisono.launch.store.server import (
    ADD,
    APPEND,
    CHECK,
    COMPARE,
    COUNT,
    DELETE,
    DONE,
    GET,
    HELLO,
    KEYS,
    REFUSED,
    SET,
    WAIT,
    Parts,
    StoreServer,
    frame,
    next_message,
)
from unisono.launch.store.session import Forged, Session
from unisono.launch.tunnel import addresses

DEFAULT_TIMEOUT = timedelta(seconds=300)  # as of torch's stores
_MARGIN = 30.0  # seconds that an answer may come later than the server was asked for
_PAUSE = 0.02  # seconds between attempts to connect, at first
_GREETING = 10.0  # seconds in which a server answers a connection, however many others there are


class AuthenticatedStore(dist.Store):
    """A connection to the store at an address, for one thread at a time."""

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        timeout: timedelta = DEFAULT_TIMEOUT,
        server: StoreServer | None = None,
        family: list[AuthenticatedStore] | None = None,
    ) -> None:
        """`server` is kept: the store is served by this process."""
        super().__init__()
        self.set_timeout(timeout)
        self.host, self.port, self.server = address, port, server
        self._key = key
        self._tunnel = addresses.of_job()
        self._lock = threading.Lock()
        self._arrived = bytearray()
        self._socket, self._session = _connect(address, port, key, timeout.total_seconds())
        # torch keeps a store by its C++ half only: this list keeps the Python halves, until one of them is closed
        self._family = family if family is not None else []
        self._family.append(self)

    def close(self) -> None:
        """Close this connection and those of its clones."""
        for each in self._family:
            each._socket.close()
        self._family.clear()

    def clone(self) -> AuthenticatedStore:
        """A connection of its own."""
        return AuthenticatedStore(self.host, self.port, self._key, self._limit, None, self._family)

    @property
    def _limit(self) -> timedelta:
        """How long a key is waited for, as set here or through a PrefixStore."""
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        return limit

    # ---- torch's interface ---------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        given = map(_bytes, values)
        if self._tunnel is not None:
            given = map(self._tunnel.outgoing, given)
        self._request(SET, *(each for pair in zip(_keys(keys), given, strict=True) for each in pair))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self._request(GET, b"%d" % _milliseconds(self._limit), *_keys(keys), wait=self._limit)
        return found if self._tunnel is None else list(map(self._tunnel.incoming, found))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout = self._limit if timeout is None else timeout
        self._request(WAIT, b"%d" % _milliseconds(timeout), *_keys(keys), wait=timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._request(ADD, key.encode(), b"%d" % amount)[0])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._request(COMPARE, key.encode(), _bytes(expected), _bytes(desired))[0]

    def check(self, keys: list[str]) -> bool:
        return bool(self._request(CHECK, *_keys(keys))[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._request(DELETE, key.encode())[0])

    def num_keys(self) -> int:
        return int(self._request(COUNT)[0])

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._request(KEYS)]

    def append(self, key: str, value: Any) -> None:
        self._request(APPEND, key.encode(), _bytes(value))

    def has_extended_api(self) -> bool:
        return True

    deleteKey, getNumKeys, listKeys = delete_key, num_keys, list_keys  # as C++ calls them, through a PrefixStore

    # ---- the connection ------------------------------------------------------------------------------------------

    def _request(self, kind: int, *parts: bytes, wait: timedelta | None = None) -> Parts:
        """The server's answer. DistStoreError when it comes too late, DistNetworkError without one."""
        seconds = (self._limit if wait is None else wait).total_seconds() + _MARGIN
        with self._lock:
            try:
                self._socket.settimeout(seconds)
                self._socket.sendall(frame(self._session, [bytes([kind]), *parts]))
                while (answer := next_message(self._session, self._arrived)) is None:
                    data = self._socket.recv(1 << 16)
                    if not data:
                        raise ConnectionResetError("the store has closed the connection")
                    self._arrived += data
            except Forged:
                self._socket.close()
                raise dist.DistNetworkError(
                    f"an answer at {self.host} port {self.port} does not come from the job's store"
                ) from None
            except OSError as error:
                raise dist.DistNetworkError(f"the job's store at {self.host} port {self.port}: {error}") from None
        if answer[0] != DONE:
            missing = ", ".join(key.decode(errors="replace") for key in answer[1:][:8])
            raise dist.DistStoreError(f"wait timeout after {seconds - _MARGIN:g} s, keys: {missing}")
        return answer[1:]


def _connect(address: str, port: int, key: bytes, timeout: float) -> tuple[socket.socket, Session]:
    """A proved connection. Tries again until the timeout while nobody answers, as torch's store does."""
    deadline, pause = time.monotonic() + timeout, _PAUSE
    while True:
        left = deadline - time.monotonic()
        try:
            end = socket.create_connection((address, port), timeout=max(0.1, min(left, _GREETING)))
            try:
                return end, _greet(end, key)
            except BaseException:
                end.close()
                raise
        except Forged:
            raise dist.DistNetworkError(
                f"whoever listens at {address} port {port} does not know this job's secret, or knows another one"
            ) from None
        except OSError as error:
            if left <= 0:
                raise dist.DistNetworkError(f"timed out connecting to {address} port {port}: {error}") from None
        time.sleep(min(pause, max(0.0, left)))
        pause = min(2 * pause, 0.5)


def _greet(end: socket.socket, key: bytes) -> Session:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.settimeout(_GREETING)
    servers, own_nonce = _exactly(end, session.NONCE), session.nonce()
    own = Session(key, servers, own_nonce, serves=False)
    end.sendall(own_nonce + own.sign(HELLO))
    proof = _exactly(end, session.MAC)
    if proof == REFUSED:
        raise Forged
    own.verify(HELLO, proof)
    return own


def _exactly(end: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = end.recv(length - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _keys(keys: list[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _milliseconds(timeout: timedelta) -> int:
    return max(0, int(timeout.total_seconds() * 1e3))
