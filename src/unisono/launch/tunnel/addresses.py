"""gloo's addresses on their way through the job's store, where ranks of several hosts talk through tunnels.

A rank of gloo publishes the host's name, a struct sockaddr_storage with its listener's address, a sequence number and
others for its pairs, with their lengths before them. What leaves a rank has the number of its node instead of the
address, in a range that leads nowhere. What comes from another node is the address of a listener of this host's tunnel.

Note: who connects. Of two ranks the one with the greater address connects to the other, which waits. So a rank of a
greater node reads an address below every other, 0.0.0.0, which is this host, and one of a smaller node an address above
its own, at which nobody listens.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import CommError
from unisono.launch import environment

SOCKET = "tunnel"  # in the folder of a tunnel: where ranks ask
_LENGTH = struct.Struct("<Q")
_SIZE = 136  # bytes of an address: sockaddr_storage and a sequence number
_NODES = int(ipaddress.ip_address("240.0.0.0"))  # reserved for ever: no route leads there
_BELOW, _ABOVE = "0.0.0.0", "127.255.255.254"


class RankTunnel:
    """A rank's connection to the tunnel of its host."""

    def __init__(self, node: int, folder: Path) -> None:
        self._node = node
        self._folder = folder
        self._lock = threading.Lock()
        self._pid = 0
        self._end: socket.socket | None = None

    def outgoing(self, value: bytes) -> bytes:
        """What a rank writes into the store, for ranks of any node."""
        at = _find(value)
        if at is None:
            return value
        port, address = _read(value, at)
        if address.version != 4 or not address.is_loopback:
            raise CommError(
                f"with --encrypt gloo listens on the loopback interface, and here on {address}: leave the choice of "
                "its interface (GLOO_SOCKET_IFNAME, a device) to unisono"
            )
        self._ask({"register": port})
        return _written(value, at, port, ipaddress.IPv4Address(_NODES + self._node))

    def incoming(self, value: bytes) -> bytes:
        """What a rank reads there."""
        at = _find(value)
        if at is None:
            return value
        port, address = _read(value, at)
        node = int(address) - _NODES if address.version == 4 else -1
        if node < 0:
            raise CommError(f"with --encrypt a rank has published gloo's address {address}: it was not started with it")
        if node == self._node:
            return _written(value, at, port, ipaddress.IPv4Address("127.0.0.1"))
        if node > self._node:
            return _written(value, at, port, ipaddress.IPv4Address(_ABOVE))
        return _written(value, at, self._ask({"reach": [node, port]})["port"], ipaddress.IPv4Address(_BELOW))

    def _ask(self, request: Mapping[str, object]) -> dict[str, int]:
        with self._lock:
            try:
                if self._end is None or self._pid != os.getpid():  # not that of the process this one was forked from
                    self._end, self._pid = _connected(self._folder), os.getpid()
                self._end.sendall(json.dumps(request).encode() + b"\n")
                text = b""
                while not text.endswith(b"\n"):
                    data = self._end.recv(1 << 12)
                    if not data:
                        raise ConnectionResetError("it has closed the connection")
                    text += data
            except OSError as error:
                raise CommError(f"the tunnel of this host, which --encrypt needs, does not answer: {error}") from None
        answer: dict[str, int] = json.loads(text)
        return answer


def of_job(environ: Mapping[str, str] = os.environ) -> RankTunnel | None:
    """The tunnel of this rank's host; None where ranks talk without, and in a job within the job."""
    node, master_port, folder = (environ.get(environment.TUNNEL) or "- - -").split(" ", 2)
    return RankTunnel(int(node), Path(folder)) if master_port == environ.get("MASTER_PORT") else None


def variables(node: int, master_port: int, folder: Path) -> dict[str, str]:
    """With these a rank finds the tunnel. NCCL, which does not go through it, is kept on the host as gloo is."""
    kept = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return {environment.TUNNEL: f"{node} {master_port} {folder}", **kept}


def _find(value: bytes) -> int | None:
    """Where an address of gloo begins in a value; None in any other value."""
    if len(value) < _LENGTH.size:
        return None
    at = 2 * _LENGTH.size + _LENGTH.unpack_from(value)[0]
    if len(value) < at + _SIZE or (len(value) - at) % _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(value, at - _LENGTH.size)
    (family,) = struct.unpack_from("=H", value, at)
    return at if length == _SIZE and family in (socket.AF_INET, socket.AF_INET6) else None


def _read(value: bytes, at: int) -> tuple[int, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    (family,), (port,) = struct.unpack_from("=H", value, at), struct.unpack_from("!H", value, at + 2)
    if family == socket.AF_INET6:
        return port, ipaddress.IPv6Address(value[at + 8 : at + 24])
    return port, ipaddress.IPv4Address(value[at + 4 : at + 8])


def _written(value: bytes, at: int, port: int, address: ipaddress.IPv4Address) -> bytes:
    return value[: at + 2] + struct.pack("!H", port) + address.packed + value[at + 8 :]


def _connected(folder: Path) -> socket.socket:
    """By way of the folder: the path of a socket may have 107 bytes."""
    end = socket.socket(socket.AF_UNIX)
    there = os.open(folder, os.O_PATH)
    try:
        end.connect(f"/proc/self/fd/{there}/{SOCKET}")
    finally:
        os.close(there)
    return end
