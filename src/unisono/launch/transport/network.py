"""Addresses, interfaces and reachability of this host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from pathlib import Path

_SIOCGIFADDR = 0x8915


def listen(address: str, port: int, backlog: int = 2048) -> socket.socket:
    """A listening socket on address ("" is every interface); port 0 lets the system choose."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def listen_at(address: str, port: int) -> socket.socket:
    """A listening socket on an address by which other hosts know this one, or a name of such an address. On every
    interface where no interface has it, and for a name that does not stand for just one address of this host."""
    for each in [address] if _is_address(address) else _addresses_of(address):
        try:
            return listen(each, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return listen("::" if ":" in address else "", port)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _addresses_of(name: str) -> list[str]:
    """The address that a name stands for; none where there are several. Other hosts know this one by no loopback
    address, though it may itself (127.0.1.1 in /etc/hosts)."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return []
    if name != "localhost":
        found = {each for each in found if not ipaddress.ip_address(each).is_loopback}
    of_version_4 = [each for each in found if ":" not in each]
    known = of_version_4 or [each for each in found if "%" not in each]
    return known if len(known) == 1 else []


def reserve_port() -> socket.socket:
    """A socket that keeps a free port for a program of this host, which may listen there while this one does not."""
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def source_address(towards: str) -> str:
    """The local address of a connection to another host. Sends nothing."""
    family, _, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface that carries an address of this host."""
    if address.startswith("127."):
        return "lo"
    if ":" in address:
        return _interface_of_v6(address)
    return next((name for name, own in _interfaces().items() if own == address), None)


def _interface_of_v6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[5] for line in lines if line.startswith(wanted)), None)


def addresses_of_ssh() -> tuple[str | None, str | None]:
    """(the launcher's address, this host's address) of the ssh connection that started this process."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return (words[0], words[2]) if len(words) == 4 else (None, None)


def all_addresses() -> list[str]:
    """This host's own IPv4 addresses, loopback last."""
    return sorted(_interfaces().values(), key=lambda address: address.startswith("127."))


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(control.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(reply[20:24])
    return found


def reach(address: str, port: int, timeout: float) -> float | str:
    """Seconds to open a TCP connection, or the error."""
    start = time.perf_counter()
    try:
        with socket.create_connection((address, port), timeout=timeout):
            return time.perf_counter() - start
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return (error.strerror or str(error)).lower()
