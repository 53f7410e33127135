"""`unisono run --encrypt`: what crosses the network between hosts, who may talk to a tunnel, how jobs with it end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.launch import namespaces
from tests.launch.harness import Run, await_end, is_alive, wait_for, write_script
from tests.launch.namespaces import ADDRESSES, Hosts
from tests.ranks import free_port
from unisono.errors import CommError, LaunchError
from unisono.launch import environment
from unisono.launch.store import secret
from unisono.launch.tunnel import addresses, certificate
from unisono.launch.tunnel.addresses import RankTunnel
from unisono.launch.tunnel.host_tunnel import HostTunnel

LOOP = "127.0.0.1"
PATIENCE = 60.0

# ---- tunnels by themselves -----------------------------------------------------------------------------------------


@pytest.fixture
def tunnels(tmp_path: Path) -> Iterator[list[HostTunnel]]:
    """Of two nodes, on this host. The job's store is not there."""
    made = []
    for node in range(2):
        folder = tmp_path / str(node)
        folder.mkdir(0o700)
        made.append(HostTunnel(f"host{node}", LOOP, folder))
    introductions = [each.introduction for each in made]
    for node, each in enumerate(made):
        each.connect(node, (LOOP, 1) if node == 0 else None, introductions)
    yield made
    for each in made:
        each.close()


def _ask(tunnel: HostTunnel, **request: Any) -> tuple[dict[str, int], socket.socket]:
    """As a rank does; the rank ends where the connection is closed."""
    end = socket.socket(socket.AF_UNIX)
    end.connect(os.path.relpath(tunnel.folder / addresses.SOCKET))
    end.sendall(json.dumps(request).encode() + b"\n")
    return json.loads(end.makefile().readline()), end


def _through(tunnels: list[HostTunnel], port: int) -> socket.socket:
    """A connection from node 1 to a port of node 0."""
    answer, _kept = _ask(tunnels[1], reach=[0, port])
    end = socket.create_connection((LOOP, answer["port"]))
    end.settimeout(PATIENCE)
    _listening_for.append(_kept)
    return end


_listening_for: list[socket.socket] = []


def _read_all(end: socket.socket) -> bytes:
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while more := end.recv(1 << 20):
            data += more
    return bytes(data)


def test_bytes_arrive_in_both_directions_and_all_before_the_end(tunnels: list[HostTunnel]) -> None:
    given, answered = os.urandom(20_000_003), os.urandom(30_000_001)
    with socket.create_server((LOOP, 0)) as listening:
        listening.settimeout(PATIENCE)
        port = listening.getsockname()[1]
        _answer, kept = _ask(tunnels[0], register=port)
        with _through(tunnels, port) as here, listening.accept()[0] as there:
            there.settimeout(PATIENCE)
            sender = threading.Thread(target=here.sendall, args=(given,))
            sender.start()
            other = threading.Thread(target=lambda: (there.sendall(answered), there.close()))
            arrived = bytearray()
            while len(arrived) < len(given):  # while nothing is read at the other end
                arrived += there.recv(1 << 20)
            sender.join()
            other.start()
            assert hashlib.sha256(arrived).digest() == hashlib.sha256(given).digest()
            assert hashlib.sha256(_read_all(here)).digest() == hashlib.sha256(answered).digest()
            other.join()
        kept.close()


def test_what_a_rank_said_last_arrives_though_it_is_still_spoken_to(tunnels: list[HostTunnel]) -> None:
    last = os.urandom(3_000_000)
    with socket.create_server((LOOP, 0)) as listening:
        listening.settimeout(PATIENCE)
        _answer, kept = _ask(tunnels[0], register=listening.getsockname()[1])
        with _through(tunnels, listening.getsockname()[1]) as here, listening.accept()[0] as there:

            def speak() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        here.sendall(bytes(100_000))

            def speak_last() -> None:
                there.sendall(last)
                there.shutdown(socket.SHUT_WR)  # unlike an end with unread bytes, which the kernel turns into a reset

            threads = [threading.Thread(target=each) for each in (speak, speak_last)]
            for each in threads:
                each.start()
            assert _read_all(here) == last
            here.shutdown(socket.SHUT_RDWR)
            for each in threads:
                each.join()
        kept.close()


def test_a_port_that_no_rank_has_registered_leads_nowhere(tunnels: list[HostTunnel]) -> None:
    with socket.create_server((LOOP, 0)) as listening:
        listening.settimeout(PATIENCE)
        port = listening.getsockname()[1]
        with _through(tunnels, port) as end:
            assert _read_all(end) == b""
        _answer, rank = _ask(tunnels[0], register=port)
        with _through(tunnels, port) as end:
            listening.accept()[0].close()  # the first that has come
            assert _read_all(end) == b""
        rank.close()  # it has ended
        listening.settimeout(0)
        while True:
            with _through(tunnels, port) as end:
                assert _read_all(end) == b""
            try:
                listening.accept()[0].close()
            except BlockingIOError:
                break


def test_strangers_are_closed(tunnels: list[HostTunnel], tmp_path: Path) -> None:
    _, port, known, _ = tunnels[0].introduction
    with socket.create_server((LOOP, 0)) as listening:
        listening.settimeout(PATIENCE)
        target = listening.getsockname()[1]
        _answer, kept = _ask(tunnels[0], register=target)
        with socket.create_connection((LOOP, port)) as end:
            end.sendall(os.urandom(1000))
            end.settimeout(PATIENCE)
            _read_all(end)  # an alert at most, then the end
        own, _ = certificate.make(tmp_path)
        stranger = certificate.context(ssl.PROTOCOL_TLS_CLIENT, own, [known])
        without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
        for context in (stranger, without):
            with contextlib.suppress(OSError), socket.create_connection((LOOP, port)) as end:
                end.settimeout(PATIENCE)
                with context.wrap_socket(end) as tls:
                    tls.sendall(struct.pack("!H", target))
                    assert tls.recv(1) == b""
        with _through(tunnels, target) as end:
            listening.accept()[0].close()  # of those that have come, the only one
            assert _read_all(end) == b""
        kept.close()


def test_a_node_that_has_another_certificate_is_not_believed(tunnels: list[HostTunnel], tmp_path: Path) -> None:
    """Who has taken the address of a node's tunnel, and even the key of another node's."""
    folder = tmp_path / "third"
    folder.mkdir(0o700)
    third = HostTunnel("host2", LOOP, folder)
    first, second = (each.introduction for each in tunnels)
    impostor = (*first[:1], second[1], *first[2:])  # node 1 listens where node 0 should
    third.connect(2, None, [impostor, second, third.introduction])
    answer, _kept = _ask(third, reach=[0, 5])
    with socket.create_connection((LOOP, answer["port"])) as end:
        end.settimeout(PATIENCE)
        assert _read_all(end) == b""
    with pytest.raises(
        LaunchError, match=re.escape("host host2: cannot reach the tunnel of host host0 at 127.0.0.1 port")
    ):
        _require_until_it_fails(third)
    third.close()


def _require_until_it_fails(tunnel: HostTunnel) -> None:
    while True:
        tunnel.require_running()
        time.sleep(0.02)


def test_a_tunnel_that_was_killed_is_named(tunnels: list[HostTunnel]) -> None:
    tunnels[0].require_running()
    tunnels[0]._process.kill()
    tunnels[0]._process.wait()
    with pytest.raises(LaunchError, match=re.escape("the tunnel of host host0 has ended (code -9)")):
        tunnels[0].require_running()


def test_keys_are_made_by_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")

    def made(name: str) -> str:
        (tmp_path / name).mkdir()
        path, text = certificate.make(tmp_path / name)
        assert path.stat().st_mode & 0o077 == 0
        certificate.context(ssl.PROTOCOL_TLS_SERVER, path, [text])
        return text

    assert made("openssl") != made("again")
    monkeypatch.setenv("PATH", str(tmp_path))
    made("package")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(LaunchError, match="install one of them"):
        made("neither")


def _gloos(address: str, port: int) -> bytes:
    """What gloo publishes, on a host of two letters."""
    packed = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(address)
    return struct.pack("<Q2sQ", 2, b"vm", 136) + packed.ljust(128, b"\0") + struct.pack("<q2Q", -1, 0, 1)


def test_addresses_on_their_way_through_the_store(tunnels: list[HostTunnel]) -> None:
    first, second = RankTunnel(0, tunnels[0].folder), RankTunnel(1, tunnels[1].folder)
    gloos = [_gloos(LOOP, 40000), _gloos(LOOP, 40001)]
    published = [first.outgoing(gloos[0]), second.outgoing(gloos[1])]
    assert published == [_gloos("240.0.0.0", 40000), _gloos("240.0.0.1", 40001)]
    assert first.incoming(published[0]) == gloos[0]
    assert second.incoming(published[1]) == gloos[1]
    assert first.incoming(published[1]) == _gloos("127.255.255.254", 40001)
    found = second.incoming(published[0])
    assert found == _gloos("0.0.0.0", struct.unpack_from("!H", found, 20)[0])
    for value in (b"", b"5", b"a" * 170, gloos[0][:-1]):
        assert first.outgoing(value) == first.incoming(value) == value
    with pytest.raises(CommError, match=re.escape("and here on 10.0.0.1: leave the choice")):
        first.outgoing(_gloos("10.0.0.1", 40000))
    with pytest.raises(CommError, match=re.escape("has published gloo's address 127.0.0.1")):
        first.incoming(gloos[1])


# ---- jobs ----------------------------------------------------------------------------------------------------------

_TRAIN = """
import hashlib
import torch, torch.distributed as dist
import unisono as uni
comm = uni.init()
torch.manual_seed(comm.rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 200))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 300)).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
group = dist.new_group([0, comm.size - 1])
pair = torch.full((2,), comm.rank + 1.0)
if comm.rank in (0, comm.size - 1):
    dist.all_reduce(pair, group=group)
print(digest, comm.all_gather_object(comm.rank), pair.tolist())
uni.shutdown()
"""


def _nodes(folder: Path, *options: str, on_second: tuple[str, ...] | None = None) -> list[tuple[int, str, str]]:
    """Two nodes of two ranks, on this host, each with its launcher: exit codes and outputs."""
    (folder / "secret").unlink(missing_ok=True)
    key = secret.write(folder, secret.draw())
    port = str(free_port())
    base = ["run", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", LOOP, "--master-port", port]
    runs = [
        Run([*base, "--node-rank", str(node), *given, "script.py"], folder, {environment.SECRET_FILE: str(key)})
        for node, given in enumerate((options, options if on_second is None else on_second))
    ]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [each.start(**pipes) for each in runs]
    outputs = [each.communicate(timeout=240) for each in started]
    assert [each.left_running() for each in runs] == [[], []]
    return [(each.returncode, *output) for each, output in zip(started, outputs, strict=True)]


def test_nodes_with_launchers_of_their_own_share_a_secret(tmp_path: Path) -> None:
    write_script(tmp_path, _TRAIN)
    plain, encrypted = _nodes(tmp_path), _nodes(tmp_path, "--encrypt")
    assert [code for code, _, _ in encrypted] == [0, 0], encrypted
    assert [sorted(each[1].splitlines()) for each in encrypted] == [sorted(each[1].splitlines()) for each in plain]
    assert "[5.0, 5.0]" in encrypted[0][1]


def test_all_nodes_encrypt_or_none(tmp_path: Path) -> None:
    write_script(tmp_path, _TRAIN)
    ended = _nodes(tmp_path, "--encrypt", on_second=())
    assert all(", --encrypt" in err and "but another node of the job at" in err for _, _, err in ended), ended
    assert [code for code, _, _ in ended] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["-H", "a,b", "--backend", "mpi"], "mpi was given, whose connections belong to the site's MPI: use gloo"),
        (["-n", "2", "--backend", "nccl"], "nccl was given, whose connections belong to NCCL: use gloo"),
        (["-H", "a,b", "--no-python"], "--encrypt and --no-python exclude each other"),
        (
            ["--nnodes", "2", "--node-rank", "0", "--master-addr", "a"],
            "needs a secret that all share: name a file with it in UNISONO_SECRET_FILE",
        ),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], output: str) -> None:
    write_script(tmp_path, "open('started', 'w')").chmod(0o755)
    done = Run(["run", "--encrypt", *arguments, "./script.py"], tmp_path).finish()
    assert (done.returncode, done.stdout) == (2, "")
    assert output in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "started").exists()


def test_on_one_host_there_is_nothing_to_encrypt(tmp_path: Path) -> None:
    write_script(tmp_path, "import os; print(os.environ.get('UNISONO_TUNNEL'))")
    done = Run(["run", "--encrypt", "-n", "1", "script.py"], tmp_path).finish()
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] None\n", "")


# ---- two hosts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(f"no two hosts on this machine: {reason}")
    with namespaces.two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def _run(hosts: Hosts, folder: Path, *arguments: str) -> Run:
    variables = {"UNISONO_SSH": hosts.ssh, "TMPDIR": str(folder)}
    run = Run([], folder, variables, before=hosts.inside, host=hosts.namespaces[0])
    python = str(warm.write_stand_in(folder / "python", run.mark))
    run.arguments = ["run", "--python", python, "-H", "node0:2,node1:2", *arguments, "script.py"]
    return run


def _tunnels(hosts: Hosts) -> list[int]:
    """The processes of tunnels on both hosts."""
    found = []
    for name in hosts.namespaces:
        words = ["ip", "netns", "pids", name]
        for pid in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split():
            with contextlib.suppress(OSError):
                if b"unisono.launch.tunnel.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return [pid for pid in found if is_alive(pid)]


def _await_no_tunnel(hosts: Hosts) -> None:
    for pid in _tunnels(hosts):
        await_end(pid)


_CAPTURE = """
import socket, sys
words = [bytes.fromhex(each) for each in sys.argv[2:]]
cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
cable.setsockopt(socket.SOL_SOCKET, 33, 1 << 28)  # SO_RCVBUFFORCE
cable.bind((sys.argv[1], 0))
cable.settimeout(0.2)
print("listening", flush=True)
seen, count, is_over = set(), 0, False
while True:
    try:
        packet = cable.recv(1 << 17)
    except TimeoutError:
        if is_over:
            break
        import select
        is_over = bool(select.select([0], [], [], 0)[0])
        continue
    count += len(packet)
    seen |= {at for at, word in enumerate(words) if word in packet}
print(count, *sorted(seen))
"""

_MARKED = """
import os, sys
import torch, torch.distributed as dist
import unisono as uni
tensor, thing, key = (bytes.fromhex(each) for each in os.environ["MARKS"].split())
comm = uni.init()
whole = torch.frombuffer(bytearray(tensor * 4096), dtype=torch.uint8)
got = whole.clone() if comm.rank == 0 else torch.zeros(len(whole), dtype=torch.uint8)
dist.broadcast(got, 0)
assert got.tolist() == whole.tolist()
assert comm.all_gather_object(thing if comm.rank == 3 else b"")[3] == thing
store = dist.distributed_c10d._get_default_store()
if comm.rank == 3:
    store.set("mark", key)
assert store.get("mark") == key
print("all right")
"""


@pytest.mark.hosts
@pytest.mark.parametrize("encrypts", [False, True])
def test_what_crosses_the_network(hosts: Hosts, tmp_path: Path, encrypts: bool) -> None:
    """A tensor, an object and a value of the store; the cable's own end sees them all without --encrypt."""
    write_script(tmp_path, _MARKED)
    marks = [os.urandom(16).hex() for _ in range(3)]
    words = ["ip", "netns", "exec", hosts.namespaces[0], sys.executable, "-c", _CAPTURE, hosts.ends[0], *marks]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as capture:
        assert capture.stdout is not None
        assert capture.stdout.readline() == "listening\n"
        options = ["--encrypt"] if encrypts else ["--backend", "gloo"]
        done = _run(hosts, tmp_path, *options, "-x", f"MARKS={' '.join(marks)}").finish(timeout=240)
        count, *seen = capture.communicate("\n", timeout=60)[0].split()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all right") == 4
    assert int(count) > 1 << 16
    assert seen == ([] if encrypts else ["0", "1", "2"])
    _await_no_tunnel(hosts)
    assert not list(tmp_path.glob("unisono-*"))  # of the first host's agent, with its key


@pytest.mark.hosts
def test_training_is_the_same(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, _TRAIN)
    plain = _run(hosts, tmp_path, "--backend", "gloo").finish(timeout=240)
    encrypted = _run(hosts, tmp_path, "--encrypt").finish(timeout=240)
    assert encrypted.returncode == 0, encrypted.stderr
    assert len(plain.stdout.splitlines()) == 4
    assert sorted(plain.stdout.splitlines()) == sorted(encrypted.stdout.splitlines())


@pytest.mark.thorough
@pytest.mark.hosts
def test_hosts_that_know_each_other_by_ipv6(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    if reason := namespaces.why_not():
        pytest.skip(f"no two hosts on this machine: {reason}")
    write_script(tmp_path, _TRAIN)
    with namespaces.two_hosts(tmp_path_factory.mktemp("hosts"), namespaces.ADDRESSES_6) as made:
        done = [_run(made, tmp_path, *options).finish(240) for options in (["--backend", "gloo"], ["--encrypt"])]
        assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
        assert len(done[0].stdout.splitlines()) == 4
        assert sorted(done[0].stdout.splitlines()) == sorted(done[1].stdout.splitlines())
        _await_no_tunnel(made)


_WAITS = """
import os, pathlib, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt = os.environ["UNISONO_ATTEMPT"]
for _ in range(2):
    dist.all_reduce(torch.ones(1000))
rank = dist.get_rank()
pathlib.Path(f"up.{attempt}.{rank}.tmp").write_text(f"{os.getpid()} {os.getppid()}")
os.rename(f"up.{attempt}.{rank}.tmp", f"up.{attempt}.{rank}")
while not pathlib.Path(f"go.{attempt}").exists():
    time.sleep(0.02)
if pathlib.Path(f"go.{attempt}").read_text() == str(rank):
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1000))
print("well", attempt)
"""


def _await_ranks(folder: Path, process: Any, attempt: int = 0) -> list[list[int]]:
    """Process ids of the ranks and of their agents."""
    for rank in range(4):
        wait_for(folder / f"up.{attempt}.{rank}", process, patience=120)
    return [[int(each) for each in (folder / f"up.{attempt}.{rank}").read_text().split()] for rank in range(4)]


@pytest.mark.hosts
def test_a_stranger_is_closed_and_the_job_ends_well(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, _WAITS)
    with _run(hosts, tmp_path, "--encrypt").started() as process:
        _await_ranks(tmp_path, process)
        ports = _listening(hosts, 1)
        for port in ports:
            script = f"""
import socket, ssl
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
end = context.wrap_socket(socket.create_connection(({ADDRESSES[1]!r}, {port}), 60))
try:
    end.sendall(b"xx")
    print("answered" if end.recv(1) else "closed")
except OSError:
    print("closed")
"""
            words = ["ip", "netns", "exec", hosts.namespaces[0], sys.executable, "-c", script]
            done = subprocess.run(words, capture_output=True, text=True, timeout=120)
            assert done.stdout == "closed\n", done
        (tmp_path / "go.0").touch()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] well 0" for rank in range(4)]
    _await_no_tunnel(hosts)


def _listening(hosts: Hosts, host: int) -> list[int]:
    """The ports at which the tunnel of a host listens on its interface, which nobody else of the job does there."""
    words = ["ip", "netns", "exec", hosts.namespaces[host], "cat", "/proc/net/tcp"]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[1:]
    own = socket.inet_aton(ADDRESSES[host])[::-1].hex().upper()
    open_at = [each.split()[1].split(":") for each in lines if each.split()[3] == "0A"]
    everywhere = [port for address, port in open_at if address == "00000000"]
    assert everywhere == []
    found = [int(port, 16) for address, port in open_at if address == own and int(port, 16) != namespaces.PORT]
    assert len(found) == 1, "gloo, or something else, listens on the network"
    return found


@pytest.mark.hosts
def test_a_rank_that_is_killed_on_the_other_host_is_named_and_all_start_again(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, _WAITS)
    with _run(hosts, tmp_path, "--encrypt", "--max-restarts", "1").started() as process:
        _await_ranks(tmp_path, process)
        (tmp_path / "go.0").write_text("3")
        _await_ranks(tmp_path, process, attempt=1)
        (tmp_path / "go.1").write_text("2")
        _out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL
    assert "restart 1 of 1: rank 3 was killed on host node1" in err.replace("was killed by SIGKILL", "was killed")
    assert re.search(r"rank 2 .*on host node1", err.splitlines()[-1]), err
    _await_no_tunnel(hosts)


@pytest.mark.hosts
@pytest.mark.parametrize("victim", ["launcher", "agent", "tunnel"])
def test_nothing_is_left(hosts: Hosts, tmp_path: Path, victim: str) -> None:
    write_script(tmp_path, _WAITS)
    run = _run(hosts, tmp_path, "--encrypt")
    with run.started() as process:
        ranks = _await_ranks(tmp_path, process)
        tunnels = _tunnels(hosts)
        assert len(tunnels) == 2
        far = {"launcher": process.pid, "agent": ranks[3][1], "tunnel": tunnels[1]}
        os.kill(far[victim], signal.SIGKILL)
        _out, err = process.communicate(timeout=120)
        assert process.returncode != 0
        for pid in (*tunnels, *(each for pair in ranks for each in pair)):
            await_end(pid)
        assert run.left_running() == []
    if victim == "tunnel":
        assert "the tunnel of host node1 has ended (code -9)" in err
