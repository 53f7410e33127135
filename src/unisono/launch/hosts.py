"""Hosts and their slots: host lists, hostfiles, and the placement of ranks on them."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.errors import UsageError
from unisono.regular_files import read_text

LOCAL = "localhost"
_LARGEST = 1 << 24  # bytes of a hostfile
_LONGEST_NAME = 255
_SHOWN = 200  # characters of what was given, in errors
# Host names that ssh and mpiexec accept; they would parse a leading "-" as an option.
_NAME = re.compile(r"(?!-)[A-Za-z0-9_.:%@\[\]-]+")


@dataclass(frozen=True)
class Host:
    name: str
    slots: int

    @property
    def is_local(self) -> bool:
        return self.name in _own_names()


@dataclass(frozen=True)
class Placement:
    """Ranks first_rank .. first_rank + count - 1 run on host."""

    host: Host
    first_rank: int
    count: int


def parse_list(text: str) -> list[Host]:
    """Hosts from `a:2,b:2`; a name without a number has one slot."""
    hosts: list[Host] = []
    for item in text.split(","):
        name, colon, count = item.strip().rpartition(":")
        if not colon:
            name, count = item.strip(), "1"
        where = f"--hosts {shown(text)}"
        if not name:
            raise UsageError(f"{where}: {shown(item)} names no host; write it like a:2,b:2")
        host = _host(name, count, where)
        _require_new(host, hosts, where)
        hosts.append(host)
    return hosts


def parse_file(path: str | Path) -> list[Host]:
    """Hosts from a hostfile: a line is `node0 slots=4`; `#` starts a comment; blank lines are fine.

    Batch systems write the bare name once for each slot instead: such lines are counted.
    """
    try:
        lines = _text(str(path)).splitlines()
    except OSError as error:
        raise UsageError(f"hostfile {str(path)!r} cannot be read: {error.strerror}; check the path") from None
    except ValueError:
        raise UsageError(f"hostfile {str(path)!r} is not a text file") from None
    hosts: list[Host] = []
    counted: set[str] = set()  # hosts given without slots
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        if len(words) > 2 or (len(words) == 2 and not words[1].startswith("slots=")):
            raise UsageError(f"{where}: cannot read {shown(line.strip())}; a line is `node0 slots=4`")
        name, _, slots = words[0].rpartition(":")
        if name and ":" not in name and slots.isdecimal():  # as in --hosts; an IPv6 address has more colons
            raise UsageError(f"{where}: cannot read {words[0]!r}; in a hostfile that is `{name} slots={slots}`"[:600])
        count = words[1].removeprefix("slots=") if len(words) == 2 else "1"
        host = _host(words[0], count, where)
        if len(words) == 1 and host.name in counted:
            hosts = [replace(each, slots=each.slots + (each.name == host.name)) for each in hosts]
            continue
        _require_new(host, hosts, where)
        hosts.append(host)
        counted |= {host.name} if len(words) == 1 else set()
    if not hosts:
        raise UsageError(f"hostfile {str(path)!r} names no host; a line is `node0 slots=4`")
    return hosts


def assign_ranks(hosts: list[Host], n: int | None) -> list[Placement]:
    """Place n ranks (None: one for every slot) on the hosts in order; hosts without ranks are dropped."""
    slots = sum(host.slots for host in hosts)
    if n is None:
        n = slots
    if n <= 0:
        raise UsageError(f"-n {n}: the number of ranks must be at least 1")
    if n > slots:
        named = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(f"-n {n} asks for more ranks than the hosts have slots ({named}: {slots}); add slots")
    placements = []
    first = 0
    for host in hosts:
        count = min(host.slots, n - first)
        if count:
            placements.append(Placement(host, first, count))
        first += count
    return placements


def _host(name: str, count: str, where: str) -> Host:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {shown(name)} is not a host name")
    if len(name) > _LONGEST_NAME:
        raise UsageError(f"{where}: {shown(name)} has {len(name)} characters; a host name has at most {_LONGEST_NAME}")
    if not re.fullmatch("[0-9]{1,6}", count) or int(count) < 1:
        raise UsageError(f"{where}: the slots of {name} must be a whole number of at least 1, not {shown(count)}")
    return Host(name, int(count))


def _require_new(host: Host, hosts: list[Host], where: str) -> None:
    """Two nodes on one host would have equal local ranks, and so use the same GPUs."""
    for other in hosts:
        if other.name == host.name:
            raise UsageError(f"{where}: host {host.name!r} is given twice; give it once with all its slots")
        if other.is_local and host.is_local:
            both = f"{other.name!r} and {host.name!r} are the same host, this one"
            raise UsageError(f"{where}: {both}; give it once with all its slots ({other.slots + host.slots})")


def _text(path: str) -> str:
    """Of a file, or of a pipe that the shell has made: `-f <(scontrol show hostnames)`."""
    if re.fullmatch(r"/dev/(fd/[0-9]+|stdin)|/proc/self/fd/[0-9]+", path):
        with open(path, encoding="utf-8-sig") as file:
            return file.read(_LARGEST)
    return read_text(path, _LARGEST, encoding="utf-8-sig")


def shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ...")


def _own_names() -> set[str]:
    name = socket.gethostname()
    return {LOCAL, "127.0.0.1", "::1", name, name.partition(".")[0]}
