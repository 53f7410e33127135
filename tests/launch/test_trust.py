"""Who may talk to a job: attacks from another process on running jobs, on gloo and MPI."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono as uni
from tests.launch.harness import Address, Run, listening, wait_for, write_script
from tests.launch.test_mpi import WHERE
from tests.ranks import free_port
from unisono.comm.c10d import all_gather_single
from unisono.comm.communicator import Communicator
from unisono.errors import CommError, UsageError
from unisono.launch import environment
from unisono.launch.store import secret, server, session
from unisono.launch.store.client import AuthenticatedStore
from unisono.launch.store.server import StoreServer
from unisono.launch.transport import network

KEY = b"k" * 32
SOON = timedelta(seconds=60)

# ---- a running job -------------------------------------------------------------------------------------------------

_PROGRAM = """
import os, pathlib, time
import unisono as uni
comm = uni.init()
if comm.rank == 0:
    variables = [os.environ.get(name, "") for name in ("MASTER_PORT", "UNISONO_STORE", "UNISONO_SECRET_FILE")]
    pathlib.Path("part").write_text("\\n".join(variables))
    os.rename("part", "address")
while not pathlib.Path("go").exists():
    time.sleep(0.02)
print("all", comm.all_gather_object(comm.rank))
"""


def _forge_a_report(port: int) -> None:
    """What made the launcher of a job with torch's store restart healthy ranks."""
    with contextlib.suppress(RuntimeError):
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1), wait_for_workers=False)
        for world in ("world_0", "attempt_0/world_0"):
            part = dist.PrefixStore(f"{world}/unisono/watchdog", store)
            part.set("report", "a forged report")
            part.set("alarm", "1 1 world")


@contextlib.contextmanager
def _flood(port: int) -> Iterator[None]:
    """In the block: connections that say nothing, one that says a byte at a time, and ones that come without end."""
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    is_over = threading.Event()

    def pour() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as each:
                each.sendall(os.urandom(1000))

    def drip() -> None:
        while not is_over.wait(0.2):
            with contextlib.suppress(OSError):
                silent[-1].sendall(b"x")

    threads = [threading.Thread(target=target) for target in (pour, drip)]
    for each in threads:
        each.start()
    yield
    is_over.set()
    for each in threads:
        each.join()
    for connection in silent:
        connection.close()


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_others_cannot_write_to_the_store_of_a_job_nor_hold_it_up(tmp_path: Path, backend: str) -> None:
    write_script(tmp_path, _PROGRAM)
    run = Run(["run", "-n", "2", "--backend", backend, "--max-restarts", "1", "script.py"], tmp_path)
    with run.started() as process:
        wait_for(tmp_path / "address", process, patience=120)
        master_port, address, path = (tmp_path / "address").read_text().split("\n")
        port = int(address.split()[1] if address else master_port)
        _forge_a_report(port)
        with _flood(port):
            time.sleep(1.5)  # three times what a watchdog needs to see an alarm
            (tmp_path / "go").touch()
            out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "restart" not in err
    assert "forged" not in err
    assert sorted(out.splitlines()) == ["[0] all [0, 1]", "[1] all [0, 1]"]
    assert "a connection from 127.0.0.1 to the job's store was closed" in err
    assert not Path(path).exists()
    assert not Path(path).parent.exists()


def test_the_secret_is_in_a_file_for_its_user_and_nowhere_else(tmp_path: Path) -> None:
    write_script(tmp_path, _PROGRAM)
    run = Run(["run", "-n", "2", "script.py"], tmp_path)
    with run.started() as process:
        wait_for(tmp_path / "address", process, patience=120)
        path = Path((tmp_path / "address").read_text().split("\n")[2])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        hidden = path.read_bytes()
        assert len(hidden) == 64
        processes = run.running()
        assert len(processes) >= 4  # launcher, agent, ranks
        for pid in processes:
            for shown in ("cmdline", "environ"):
                assert hidden not in Path(f"/proc/{pid}/{shown}").read_bytes()
        (tmp_path / "go").touch()
        assert process.wait(timeout=120) == 0


@pytest.mark.parametrize("backend", ["gloo", *WHERE])
def test_on_one_host_all_of_it_listens_on_the_loopback_interface(tmp_path: Path, backend: str) -> None:
    """But for MPI's process manager, whose sockets what it starts inherits."""
    variables = {}
    if backend != "gloo":
        if not WHERE[backend].exists():
            pytest.skip(f"{backend} is not installed")
        backend, variables = "mpi", {"UNISONO_MPIEXEC": str(WHERE[backend])}
    write_script(tmp_path, _PROGRAM)
    run = Run(["run", "-n", "2", "--backend", backend, "script.py"], tmp_path, variables)
    with run.started() as process:
        wait_for(tmp_path / "address", process, patience=120)
        own: dict[str, Address] = {}
        of_manager: dict[str, Address] = {}
        for pid in run.running():
            name = os.path.basename(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])
            (of_manager if name in (b"mpiexec", b"hydra_pmi_proxy", b"prterun") else own).update(listening(pid))
        (tmp_path / "go").touch()
        assert process.wait(timeout=120) == 0
    addresses = [address for inode, address in own.items() if inode not in of_manager]
    assert addresses  # the job's store
    assert all(address.is_loopback for address in addresses), addresses


def test_nodes_with_launchers_of_their_own_meet_at_the_address_that_they_were_told(tmp_path: Path) -> None:
    told = "127.0.0.2"
    write_script(tmp_path, _PROGRAM)
    base = ["run", "--nnodes", "2", "--master-addr", told, "--master-port", str(free_port()), "--node-rank"]
    nodes = [Run([*base, str(node), "script.py"], tmp_path) for node in range(2)]
    with nodes[0].started() as first, nodes[1].started() as second:
        wait_for(tmp_path / "address", first, patience=120)
        found = {str(address) for pid in nodes[0].running() for address in listening(pid).values()}
        (tmp_path / "go").touch()
        assert [first.wait(timeout=120), second.wait(timeout=120)] == [0, 0]
    assert told in found
    assert found <= {told, "127.0.0.1"}


NAMES = {
    "just one": (["192.0.2.1"], ["192.0.2.1"]),
    "of both versions": (["2001:db8::1", "192.0.2.1"], ["192.0.2.1"]),
    "of version 6": (["2001:db8::1", "fe80::1%eth0"], ["2001:db8::1"]),
    "several": (["192.0.2.1", "192.0.2.2"], []),
    "that of Debian's /etc/hosts": (["127.0.1.1"], []),
    "that, and its own": (["127.0.1.1", "::1", "192.0.2.1"], ["192.0.2.1"]),
    "none": ([], []),
}


@pytest.mark.parametrize(("stands_for", "expected"), NAMES.values(), ids=NAMES.keys())
def test_the_address_of_a_name(stands_for: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(name: str, *_: Any, **__: Any) -> Any:
        if not stands_for:
            raise socket.gaierror
        return [(0, 0, 0, "", (each, 0)) for each in stands_for for _ in range(2)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert network._addresses_of("node0") == expected


def test_listening_where_a_name_leads() -> None:
    with network.listen_at("localhost", 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    with network.listen_at("192.0.2.1", 0) as listening:  # of another host
        assert listening.getsockname()[0] == "0.0.0.0"


# ---- objects -------------------------------------------------------------------------------------------------------


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _send_instead(comm: Communicator, data: bytes) -> list[bytes]:
    """What whoever holds a rank's connection can do: send other bytes as its object. Returns what the ranks sent."""
    lengths = torch.empty(comm.size, dtype=torch.int64)
    all_gather_single(lengths, torch.tensor([len(data)]), group=comm.group)
    row = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    table = torch.empty(comm.size * len(row), dtype=torch.uint8)
    all_gather_single(table, row, group=comm.group)
    rows = table.view(comm.size, -1)
    return [bytes(each[:length].numpy()) for each, length in zip(rows, lengths.tolist(), strict=True)]


def _attacked(path: str) -> list[str]:
    """On rank 0, what it makes of an object that was replaced, one of another rank, and one that was sent before."""
    comm = uni.init()
    answers = []
    evil = pickle.dumps(Evil(path))
    first = _send_instead(comm, bytes(32) + evil) if comm.rank == 1 else []
    if comm.rank == 0:
        answers.append(_answer(comm))
    dist.barrier(comm.group)
    if comm.rank == 1:
        _send_instead(comm, first[0])
    else:
        answers.append(_answer(comm))
    dist.barrier(comm.group)
    if comm.rank == 1:
        good = comm.seal.sign(pickle.dumps("once"), "all_gather_object", 3, 1).numpy().tobytes()
        _send_instead(comm, good)
        _send_instead(comm, good)
    else:
        answers += [_answer(comm), _answer(comm)]
    dist.barrier(comm.group)
    values: list[Any] = [None, None]
    dist.all_gather_object(values, comm.rank)  # torch's own
    answers.append(str(values))
    uni.shutdown()
    return answers


def _answer(comm: Communicator) -> str:
    try:
        return str(comm.all_gather_object("mine"))
    except CommError as error:
        return str(error).partition(":")[2][:46]


def test_an_object_that_was_replaced_swapped_or_sent_again_is_not_unpickled(tmp_path: Path) -> None:
    refused = " what came as rank 1's object does not bear th"
    answers = uni.spawn(_attacked, 2, args=(str(tmp_path / "owned"),))
    assert answers[0] == [refused, refused, "['mine', 'once']", refused, "[0, 1]"]
    assert not (tmp_path / "owned").exists()


# ---- the store -----------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[StoreServer]:
    store = StoreServer(network.listen("127.0.0.1", 0), KEY)
    yield store
    store.close()


def test_the_store_does_what_torchs_does(served: StoreServer) -> None:
    listening = network.listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    torchs = dist.TCPStore(
        "127.0.0.1", port, None, True, SOON, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    own = AuthenticatedStore("127.0.0.1", served.port, KEY, SOON)

    def used(store: dist.Store) -> list[Any]:
        part: Any = dist.PrefixStore("part", store)
        part.set("a", "1")
        part.append("a", "2")
        part.multi_set(["b", "c"], ["x", ""])
        answers = [part.get("a"), part.multi_get(["b", "c"]), part.add("n", 5), part.add("n", -7), part.get("n")]
        answers += [part.compare_set("d", "", "first"), part.compare_set("d", "", "second")]
        answers += [part.compare_set("d", "first", "third"), part.compare_set("none", "some", "any")]
        answers += [part.check(["a", "b"]), part.check(["a", "z"]), part.delete_key("a"), part.check(["a"])]
        other = part.clone()
        threading.Timer(0.05, lambda: other.set("late", "came")).start()
        part.wait(["late", "b"], SOON)
        answers.append(part.get("late"))
        with pytest.raises(dist.DistStoreError, match="timeout"):
            part.wait(["never"], timedelta(milliseconds=20))
        return answers

    assert used(own) == used(torchs)
    own.close()


def test_a_key_that_is_deleted_before_the_others_come_is_awaited_again(served: StoreServer) -> None:
    own = AuthenticatedStore("127.0.0.1", served.port, KEY, SOON)
    waiting, found = own.clone(), list[list[bytes]]()
    thread = threading.Thread(target=lambda: found.append(waiting.multi_get(["first", "second"])))
    thread.start()
    while not served._waiting:
        time.sleep(0.01)
    own.set("first", "old")
    own.delete_key("first")
    own.set("second", "2")
    assert own.num_keys() == 1  # the server is there
    assert not found
    own.set("first", "1")
    thread.join()
    assert found == [[b"1", b"2"]]


def test_the_store_answers_while_it_is_flooded(served: StoreServer) -> None:
    with _flood(served.port):
        for _ in range(20):
            store = AuthenticatedStore("127.0.0.1", served.port, KEY, SOON)
            assert store.add("n", 1)
            store.close()
    assert served.refused > 0
    assert served.first_refused == "127.0.0.1"


def test_another_secret_is_refused_by_both_ends(served: StoreServer) -> None:
    with pytest.raises(dist.DistNetworkError, match="does not know this job's secret"):
        AuthenticatedStore("127.0.0.1", served.port, b"another", SOON)
    impostor = StoreServer(network.listen("127.0.0.1", 0), b"another")
    with pytest.raises(dist.DistNetworkError, match="does not know this job's secret"):
        AuthenticatedStore("127.0.0.1", impostor.port, KEY, SOON)
    impostor.close()


def test_a_request_counts_once_and_unchanged(served: StoreServer) -> None:
    def connection() -> tuple[socket.socket, session.Session]:
        end = socket.create_connection(("127.0.0.1", served.port))
        end.settimeout(30)
        theirs, own_nonce = end.recv(32, socket.MSG_WAITALL), session.nonce()
        own = session.Session(KEY, theirs, own_nonce, serves=False)
        end.sendall(own_nonce + own.sign(server.HELLO))
        own.verify(server.HELLO, end.recv(32, socket.MSG_WAITALL))
        return end, own

    honest, session_of_honest = connection()
    request = server.frame(session_of_honest, [bytes([server.ADD]), b"n", b"1"])
    honest.sendall(request)
    assert len(honest.recv(1000)) > 32
    changed = server.frame(connection()[1], [bytes([server.ADD]), b"n", b"1"])
    for end, data in ((honest, request), (connection()[0], request), (connection()[0], changed[:-1] + b"9")):
        end.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert end.recv(1000) == b""
    store = AuthenticatedStore("127.0.0.1", served.port, KEY, SOON)
    assert store.get("n") == b"1"
    assert served.refused == 3
    store.close()


# ---- a secret that the user names ----------------------------------------------------------------------------------


def test_a_secret_that_others_could_know_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    named = {environment.SECRET_FILE: str(path)}
    with pytest.raises(UsageError, match="cannot be read"):
        secret.of_job(named)
    path.write_text("0123456789abcdef")
    path.chmod(0o640)
    with pytest.raises(UsageError, match=f"open to other users; run: chmod 600 {path}"):
        secret.of_job(named)
    path.chmod(0o600)
    assert secret.of_job(named) == secret.key_in(path)
    path.write_text("short")
    with pytest.raises(UsageError, match="has 5 bytes; expected 16 at least"):
        secret.of_job(named)
    assert secret.of_job({}) is None


def test_a_secret_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    os.mkfifo(path, 0o600)
    writer = threading.Timer(20, lambda: os.close(os.open(path, os.O_RDWR)))  # who waits for one goes on
    writer.start()
    with pytest.raises(UsageError, match=r"cannot be read \(it is not a regular file\); name a file with"):
        secret.of_job({environment.SECRET_FILE: str(path)})
    with pytest.raises(UsageError, match="cannot be read"):
        secret.key_in(tmp_path)
    writer.cancel()
    writer.join()


_MEETING = """
import sys
import unisono as uni
comm = uni.init("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=20)
print(comm.all_gather_object(comm.rank))
uni.shutdown()
"""


def test_ranks_without_a_launcher_share_a_secret_that_the_user_names(tmp_path: Path) -> None:
    write_script(tmp_path, _MEETING)
    key = secret.write(tmp_path, secret.draw())
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, "script.py", url]
    variables = {**os.environ, environment.SECRET_FILE: str(key), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*words, str(rank)], cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [each.communicate(timeout=120)[0] for each in ranks] == ["[0, 1]\n"] * 2
