"""Two hosts on one machine: network namespaces joined by a cable, each with an sshd of its own.

They share the file system and nothing of the network, so what runs over ssh between them is real.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
NAMES = ("node0", "node1")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
ADDRESSES_6 = ("fd13:77::1", "fd13:77::2")
PORT = 2222
_NUMBERS = itertools.count()


def why_not() -> str | None:
    """Why two hosts cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program ip (package iproute2) is missing"
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "sshd or ssh (packages openssh-server, openssh-client) is missing"
    probe = f"uniprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


@dataclass(frozen=True)
class Hosts:
    folder: Path
    namespaces: tuple[str, str]
    daemons: list[subprocess.Popen[bytes]]
    ends: tuple[str, str]  # of the cable between them
    addresses: tuple[str, str] = ADDRESSES

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder / 'config'}"

    @property
    def inside(self) -> list[str]:
        """The words that run a command on the first host."""
        return _on(self.namespaces[0])

    def kill_second(self) -> None:
        """The second host is gone: its sshd and everything else that runs there, at once, so that none of them sees
        another end and tells of it."""
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            words = ["ip", "netns", "pids", self.namespaces[1]]
            reported = subprocess.run(words, check=True, capture_output=True, text=True)
            for pid in map(int, reported.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def revive_second(self) -> None:
        """The second host has started again."""
        self.daemons.append(_sshd(self.folder, self.namespaces[1], self.addresses[1]))

    def cut_cable(self) -> None:
        """The hosts are there, but neither hears the other any more, and nobody tells them."""
        _do("ip", "-n", self.namespaces[1], "link", "set", self.ends[1], "down")

    def mend_cable(self) -> None:
        _do("ip", "-n", self.namespaces[1], "link", "set", self.ends[1], "up")


@contextmanager
def two_hosts(folder: Path, addresses: tuple[str, str] = ADDRESSES) -> Iterator[Hosts]:
    number = f"{os.getpid()}x{next(_NUMBERS)}"  # tests of one process may hold two pairs of hosts at once
    names, ends = (f"uni{number}a", f"uni{number}b"), (f"uv{number}a", f"uv{number}b")
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _cable(names, ends, addresses)
        _keys(folder, addresses)
        _client_config(folder, addresses)
        for name, address in zip(names, addresses, strict=True):
            daemons.append(_sshd(folder, name, address))
        hosts = Hosts(folder, names, daemons, ends, addresses)
        _wait_until_up(hosts)
        yield hosts
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(timeout=10)
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _on(namespace: str) -> list[str]:
    """The words that run a command on a host: in its network, and with its name."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', namespace]
    return ["ip", "netns", "exec", namespace, *named]


def _cable(names: tuple[str, str], ends: tuple[str, str], addresses: tuple[str, str]) -> None:
    for name in names:
        _do("ip", "netns", "add", name)
    _do("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for name, end, address in zip(names, ends, addresses, strict=True):
        _do("ip", "link", "set", end, "netns", name)
        network = [f"{address}/64", "nodad"] if ":" in address else [f"{address}/24"]
        _do("ip", "-n", name, "addr", "add", *network, "dev", end)
        _do("ip", "-n", name, "link", "set", end, "up")
        _do("ip", "-n", name, "link", "set", "lo", "up")


def _keys(folder: Path, addresses: tuple[str, str]) -> None:
    for name in ("client", "stranger", "host"):
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(folder / name))
    shutil.copy(folder / "client.pub", folder / "authorized_keys")
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"[{a}]:{PORT} {host_key}\n" for a in (*addresses, "127.0.0.1")))


def _client_config(folder: Path, addresses: tuple[str, str]) -> None:
    common = f"Port {PORT}\n  User root\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
    entries = [
        f"Host {name}\n  HostName {address}\n  IdentityFile {folder}/client\n  {common}"
        for name, address in zip(NAMES, addresses, strict=True)
    ]
    entries += [
        f"Host loop\n  HostName 127.0.0.1\n  IdentityFile {folder}/client\n  {common}",
        f"Host stranger\n  HostName {addresses[1]}\n  IdentityFile {folder}/stranger\n  {common}",
        f"Host nodaemon\n  HostName {addresses[1]}\n  IdentityFile {folder}/client\n  Port 2223\n",
        f"Host silent\n  HostName 10.213.77.99\n  IdentityFile {folder}/client\n  {common}",
        f"Host unknownkey\n  HostName {addresses[1]}\n  IdentityFile {folder}/client\n  Port {PORT}\n"
        f"  UserKnownHostsFile {folder}/none\n  StrictHostKeyChecking yes\n",
    ]
    (folder / "config").write_text("\n".join(entries))


def _sshd(folder: Path, namespace: str, address: str) -> subprocess.Popen[bytes]:
    Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / f"sshd.{namespace}"
    config.write_text(
        f"Port {PORT}\nListenAddress {address}\nListenAddress 127.0.0.1\n"
        f"HostKey {folder}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\n"
    )
    assert SSHD is not None
    with (folder / f"log.{namespace}").open("wb") as log:
        return subprocess.Popen([*_on(namespace), SSHD, "-D", "-e", "-f", str(config)], stdout=log, stderr=log)


def _wait_until_up(hosts: Hosts) -> None:
    deadline = time.monotonic() + 20
    for name in NAMES:
        while True:
            words = [*hosts.inside, *hosts.ssh.split(), "-o", "BatchMode=yes", name, "true"]
            done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode == 0:
                break
            assert time.monotonic() < deadline, f"{name} did not come up: {done.stderr}"
            time.sleep(0.1)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
