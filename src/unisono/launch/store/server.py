"""The server of a job's key-value store: a thread that serves whoever proves to know the job's secret.

    server: nonce    client: nonce, signed hello    server: signed hello    then requests and answers, all signed

Nothing of a connection is looked at before its hello has been verified. Until then it may send a hello's length and no
more, has a few seconds for that, and the oldest of too many such connections is closed: floods and slow clients cost a
bounded part of the thread's time. Connections that prove nothing are counted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from unisono.launch.store import session
from unisono.launch.store.session import Forged, Session

HELLO = b"unisono store 1"
REFUSED = bytes(session.MAC)  # instead of the server's hello
SET, ADD, COMPARE, GET, WAIT, CHECK, DELETE, COUNT, APPEND, KEYS = range(10)
DONE, LATE = b"\0", b"\1"
_HEAD = struct.Struct("!I")
_HELLO_LENGTH = session.NONCE + session.MAC
_PROVE = 5.0  # seconds in which a connection must prove that it belongs to the job
_UNPROVED = 256  # connections that have not, at most
_ACCEPT = 16  # connections taken between two rounds of requests
_CHUNK = 1 << 18
LONGEST = 1 << 30  # bytes of a message

Parts = list[bytes]


def pack(parts: Iterable[bytes]) -> bytes:
    """Byte strings as one."""
    return b"".join(piece for part in parts for piece in (_HEAD.pack(len(part)), part))


def unpack(content: bytes) -> Parts:
    parts, at = [], 0
    while at < len(content):
        (length,) = _HEAD.unpack_from(content, at)
        at += _HEAD.size + length
        parts.append(content[at - length : at])
    return parts


def frame(own: Session, parts: Iterable[bytes]) -> bytes:
    """A signed message."""
    content = pack(parts)
    return _HEAD.pack(len(content)) + own.sign(content) + content


def next_message(own: Session, data: bytearray) -> Parts | None:
    """Take the first message out of what has arrived; None where it is not complete. Raises Forged."""
    if len(data) < _HEAD.size:
        return None
    (length,) = _HEAD.unpack_from(data)
    end = _HEAD.size + session.MAC + length
    if length > LONGEST:
        raise Forged
    if len(data) < end:
        return None
    content = bytes(data[_HEAD.size + session.MAC : end])
    own.verify(content, bytes(data[_HEAD.size : _HEAD.size + session.MAC]))
    del data[:end]
    return unpack(content)


class _Connection:
    def __init__(self, end: socket.socket, who: str) -> None:
        self.socket = end
        self.who = who
        self.since = time.monotonic()
        self.nonce = session.nonce()
        self.session: Session | None = None
        self.arrived = bytearray()
        self.unsent = bytearray()
        self.keys: Parts = []  # that its request waits for
        self.awaited: set[bytes] = set()  # those of them that have not come
        self.until = 0.0
        self.answer: Callable[[], Parts] = list  # what it gets once they are there
        self.is_closed = False


class StoreServer:
    """Serves a store from a socket that is already listening."""

    def __init__(self, listening: socket.socket, key: bytes) -> None:
        self.refused = 0  # connections that proved nothing
        self.first_refused = ""  # where the first of them came from
        self._key = key
        self._values: dict[bytes, bytes] = {}
        self._listening = listening
        self._unproved: OrderedDict[int, _Connection] = OrderedDict()
        self._waiting: set[_Connection] = set()
        self._standing_still = threading.Lock()
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="unisono-store", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    @property
    def address(self) -> str | None:
        """None for every address of this host."""
        found = ipaddress.ip_address(self._listening.getsockname()[0])
        return None if found.is_unspecified else str(found)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """In the block the thread serves nobody, and so holds no lock of a library: this process may fork."""
        with self._standing_still:
            yield

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(5)

    # ---- connections ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_closed:
            events = self._selector.select(self._patience())
            with self._standing_still:
                for key, mask in sorted(events, key=_by_trust):
                    if isinstance(key.data, _Connection):
                        self._exchange(key.data, mask)
                    elif key.fileobj is self._listening:
                        self._accept()
                self._end_of_patience()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _patience(self) -> float | None:
        """Seconds until a connection has had its time, or a request has."""
        ends = [each.until for each in self._waiting]
        ends += [each.since + _PROVE for each in self._unproved.values()][:1]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _end_of_patience(self) -> None:
        now = time.monotonic()
        for each in [each for each in self._waiting if each.until <= now]:
            self._waiting.discard(each)
            self._send(each, [LATE, *sorted(each.awaited)])
        while self._unproved:
            oldest = next(iter(self._unproved.values()))
            if len(self._unproved) <= _UNPROVED and oldest.since + _PROVE > now:
                break
            self._refuse(oldest)

    def _accept(self) -> None:
        for _ in range(_ACCEPT):
            try:
                end, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # it has gone again, or this process has no descriptor left
                for each in list(self._unproved.values()):
                    self._refuse(each)
                return
            end.setblocking(False)
            with contextlib.suppress(OSError):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(end, str(address[0]))
            self._unproved[end.fileno()] = connection
            self._selector.register(end, selectors.EVENT_READ, connection)
            connection.unsent += connection.nonce
            self._flush(connection)

    def _exchange(self, connection: _Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if mask & selectors.EVENT_READ and not connection.is_closed:
            limit = _CHUNK if connection.session else _HELLO_LENGTH - len(connection.arrived)
            try:
                data = connection.socket.recv(limit)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:  # one that has sent nothing only looked whether somebody listens
                self._close(connection) if connection.session or not connection.arrived else self._refuse(connection)
                return
            connection.arrived += data
            if connection.session is None:
                self._greet(connection)
            else:
                self._answer_all(connection)

    def _greet(self, connection: _Connection) -> None:
        if len(connection.arrived) < _HELLO_LENGTH:
            return
        clients, proof = bytes(connection.arrived[: session.NONCE]), bytes(connection.arrived[session.NONCE :])
        own = Session(self._key, connection.nonce, clients, serves=True)
        try:
            own.verify(HELLO, proof)
        except Forged:
            connection.unsent += REFUSED
            self._flush(connection)
            self._refuse(connection)
            return
        del connection.arrived[:]
        connection.session = own
        self._unproved.pop(connection.socket.fileno(), None)
        connection.unsent += own.sign(HELLO)
        self._flush(connection)

    def _answer_all(self, connection: _Connection) -> None:
        assert connection.session is not None
        try:
            while not connection.is_closed and (request := next_message(connection.session, connection.arrived)):
                answer = self._perform(connection, request)
                if answer is not None:
                    self._send(connection, [DONE, *answer])
        except (Forged, struct.error, IndexError, ValueError):
            self._refuse(connection)

    def _send(self, connection: _Connection, parts: Parts) -> None:
        if not connection.is_closed:
            assert connection.session is not None
            connection.unsent += frame(connection.session, parts)
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send what the connection takes now; the rest when it takes more."""
        try:
            while connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _refuse(self, connection: _Connection) -> None:
        self.refused += 1
        self.first_refused = self.first_refused or connection.who
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        if connection.is_closed:
            return
        connection.is_closed = True
        self._unproved.pop(connection.socket.fileno(), None)
        self._waiting.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    # ---- requests ------------------------------------------------------------------------------------------------

    def _perform(self, connection: _Connection, request: Parts) -> Parts | None:
        """The answer; None where it has to wait."""
        (kind,), *given = request
        values = self._values
        match kind:
            case 0:  # SET: keys and values in turn
                for key, value in zip(given[::2], given[1::2], strict=True):
                    self._set(key, value)
                return []
            case 1:  # ADD
                number = int(values.get(given[0], b"0")) + int(given[1])
                self._set(given[0], b"%d" % number)
                return [values[given[0]]]
            case 2:  # COMPARE: as torch's stores, a missing value counts as an empty one
                key, expected, desired = given
                found = values.get(key)
                if (found is None and not expected) or found == expected:
                    self._set(key, desired)
                    return [desired]
                return [expected if found is None else found]
            case 3 | 4:  # GET, WAIT: milliseconds, then keys
                keys = given[1:]
                connection.answer = (lambda: [values[key] for key in keys]) if kind == GET else list
                connection.keys, connection.awaited = keys, {key for key in keys if key not in values}
                if not connection.awaited:
                    return connection.answer()
                connection.until = time.monotonic() + int(given[0]) / 1e3
                self._waiting.add(connection)
                return None
            case 5:  # CHECK
                return [b"1" if all(key in values for key in given) else b""]
            case 6:  # DELETE
                return [b"1" if values.pop(given[0], None) is not None else b""]
            case 7:  # COUNT
                return [b"%d" % len(values)]
            case 8:  # APPEND
                self._set(given[0], values.get(given[0], b"") + given[1])
                return []
            case 9:  # KEYS
                return list(values)
        raise ValueError(kind)

    def _set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for each in list(self._waiting):
            each.awaited.discard(key)
            if not each.awaited:  # unless one that had come was deleted
                each.awaited = {key for key in each.keys if key not in self._values}
            if not each.awaited:
                self._waiting.discard(each)
                self._send(each, [DONE, *each.answer()])


def _by_trust(event: tuple[selectors.SelectorKey, int]) -> int:
    """Those who belong to the job come first, new connections last."""
    connection = event[0].data
    return 2 if not isinstance(connection, _Connection) else int(connection.session is None)
