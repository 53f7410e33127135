"""The tunnel of a host: `python -m unisono.launch.tunnel.process PARENT FOLDER ADDRESS`; its stdin leads to its agent.

    agent: -> {"port", "certificate"}, <- {"node", "store", "peers": [[address, port, certificate, host], ...]},
        -> {"store": port}
    ranks, at a socket in FOLDER: {"register": port} -> {}; {"reach": [node, port]} -> {"port"}
    other tunnels, within TLS: the two bytes of a port; then the bytes of that connection

A port that no rank of this host has registered leads nowhere; 0 is the job's store, on the first node. A listener for a
rank takes one connection, which is what gloo makes. The tunnel ends with its agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.transport import network
from unisono.launch.tunnel import certificate
from unisono.launch.tunnel.addresses import SOCKET
from unisono.launch.tunnel.relay import relay
from unisono.launch.worker import process_tree

STORE = 0  # instead of a port
_LOOPBACK = "127.0.0.1"
_PORT = struct.Struct("!H")
_PROVE = 5.0  # seconds in which a connection must prove that it belongs to the job
_UNPROVED = 256  # connections that have not, at most
_DIAL = 10.0  # seconds in which another tunnel must answer


class Tunnel:
    def __init__(self, listening: socket.socket, key: Path, order: dict[str, Any], line: socket.socket) -> None:
        self._listening = listening
        self._node: int = order["node"]
        self._peers: list[list[Any]] = order["peers"]
        certificates = [each[2] for each in self._peers]
        self._known = [ssl.PEM_cert_to_DER_cert(each) for each in certificates]
        self._server = certificate.context(ssl.PROTOCOL_TLS_SERVER, key, certificates)
        self._client = certificate.context(ssl.PROTOCOL_TLS_CLIENT, key, certificates)
        self._targets: dict[int, tuple[str, int]] = {}  # what others may reach here
        self._unproved: OrderedDict[ssl.SSLSocket, float] = OrderedDict()  # since when
        self._line = line
        self._lock = threading.Lock()
        self.store_port = 0  # of a listener that leads to the job's store
        if order["store"]:
            self._targets[STORE] = tuple(order["store"])
        else:
            store = network.listen(_LOOPBACK, 0)
            self.store_port = store.getsockname()[1]
            _in_thread(self._lead, store, 0, STORE, False)

    def serve(self, control: socket.socket) -> None:
        _in_thread(self._accept)
        _in_thread(self._take_ranks, control)

    # ---- connections of other tunnels ----------------------------------------------------------------------------

    def _accept(self) -> None:
        self._listening.settimeout(1.0)
        while True:
            with contextlib.suppress(OSError):
                end, _ = self._listening.accept()
                end.settimeout(_PROVE)
                tls = self._server.wrap_socket(end, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    self._unproved[tls] = time.monotonic()
                _in_thread(self._admit, tls)
            with self._lock:
                for each, since in list(self._unproved.items()):
                    if len(self._unproved) > _UNPROVED or time.monotonic() - since > _PROVE:
                        del self._unproved[each]
                        with contextlib.suppress(OSError):
                            socket.socket.shutdown(each, socket.SHUT_RDWR)  # its thread closes it

    def _admit(self, tls: ssl.SSLSocket) -> None:
        with tls, contextlib.suppress(OSError):
            try:
                target = self._target_of(tls)
            finally:
                with self._lock:
                    self._unproved.pop(tls, None)
            if target is not None:
                relay(socket.create_connection(target, _PROVE), tls)

    def _target_of(self, tls: ssl.SSLSocket) -> tuple[str, int] | None:
        """What a connection asks for; None where it may not have it."""
        tls.do_handshake()
        if tls.getpeercert(binary_form=True) not in self._known:
            return None
        asked = tls.recv(_PORT.size)
        asked += tls.recv(1) if len(asked) == 1 else b""
        return self._targets.get(*_PORT.unpack(asked)) if len(asked) == _PORT.size else None

    # ---- ranks of this host --------------------------------------------------------------------------------------

    def _take_ranks(self, control: socket.socket) -> None:
        while True:
            end, _ = control.accept()
            _in_thread(self._answer, end)

    def _answer(self, end: socket.socket) -> None:
        """One rank, as long as it lives."""
        targets, listeners = list[tuple[str, int]](), list[socket.socket]()
        with end, contextlib.suppress(OSError, ValueError), end.makefile("rwb", buffering=0) as lines:
            while text := lines.readline():
                request, answer = json.loads(text), {}
                if "register" in request:
                    targets.append((_LOOPBACK, int(request["register"])))
                    self._targets[request["register"]] = targets[-1]
                else:
                    node, port = request["reach"]
                    listeners.append(network.listen(_LOOPBACK, 0))
                    answer = {"port": listeners[-1].getsockname()[1]}
                    _in_thread(self._lead, listeners[-1], node, port, True)
                lines.write(json.dumps(answer).encode() + b"\n")
        for target in targets:
            if self._targets.get(target[1]) is target:  # and not one that another rank has now
                del self._targets[target[1]]
        for each in listeners:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _lead(self, listening: socket.socket, node: int, port: int, once: bool) -> None:
        """What connects there reaches that port of another node."""
        with listening, contextlib.suppress(OSError):
            while True:
                end, _ = listening.accept()
                _in_thread(self._carry, end, node, port)
                if once:
                    return

    def _carry(self, end: socket.socket, node: int, port: int) -> None:
        with end:
            try:
                tls = self._dial(node)
            except OSError as error:
                address, there, _, host = self._peers[node]
                cause = getattr(error, "strerror", None) or str(error)
                self._tell({"problem": f"cannot reach the tunnel of host {host} at {address} port {there}: {cause}"})
                return
            with tls, contextlib.suppress(OSError):
                tls.sendall(_PORT.pack(port))
                relay(end, tls)

    def _dial(self, node: int) -> ssl.SSLSocket:
        """A connection to another node's tunnel, which may be about to end, or not be heard yet."""
        address, port, *_ = self._peers[node]
        deadline = time.monotonic() + _DIAL
        while True:
            try:
                end = socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic()))
                end.settimeout(_DIAL)
                tls = self._client.wrap_socket(end)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            if tls.getpeercert(binary_form=True) == self._known[node]:
                return tls
            tls.close()
            raise OSError("who listens there is another node")

    def _tell(self, message: dict[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._line.sendall(json.dumps(message).encode() + b"\n")


def _in_thread(target: Any, *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def main(parent: int, folder: Path, address: str) -> None:
    process_tree.die_with_parent(parent)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # ranks that save before they end still talk
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two descriptors for each pair of ranks and group
    line = socket.socket(fileno=os.dup(0))
    try:
        key, own = certificate.make(folder)
        listening = network.listen_at(address, 0)
        # by way of the folder: the path of a socket may have 107 bytes
        control = socket.socket(socket.AF_UNIX)
        os.chdir(folder)
        control.bind(SOCKET)
        control.listen(1024)
        greeting = {"port": listening.getsockname()[1], "certificate": own}
    except (OSError, LaunchError) as error:
        line.sendall(json.dumps({"problem": str(error)}).encode() + b"\n")
        return
    line.sendall(json.dumps(greeting).encode() + b"\n")
    order = line.makefile("rb").readline()
    if not order:
        return
    tunnel = Tunnel(listening, key, json.loads(order), line)
    key.unlink()
    tunnel.serve(control)
    line.sendall(json.dumps({"store": tunnel.store_port}).encode() + b"\n")
    while line.recv(1):
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    os._exit(0)
