"""Real remote hosts: two network namespaces, each with its own sshd."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import unisono
from tests import mpi_ranks, warm
from tests.examples.runner import run_mpiexec
from tests.launch import namespaces
from tests.launch.harness import Run, await_end, is_alive, listening, wait_for, write_script
from tests.launch.namespaces import ADDRESSES, Hosts
from tests.launch.test_mpi import WHERE

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(f"no two hosts on this machine: {reason}")
    with namespaces.two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def _run(hosts: Hosts, folder: Path, *arguments: str, anew: bool = False, **variables: str) -> Run:
    """`anew`: in interpreters of their own, on all hosts. Else agents there are forked, behind an ssh that is real."""
    environment = {"UNISONO_SSH": hosts.ssh, "UNISONO_TRAVELS": "yes", **variables}
    run = Run(["run", *arguments], folder, environment, before=hosts.inside, host=hosts.namespaces[0], anew=anew)
    if not anew and "--python" not in arguments:
        run.arguments = ["run", "--python", str(warm.write_stand_in(folder / "python", run.mark)), *arguments]
    return run


# The mark must reach the far ranks for the search for left-overs to find them: its name travels.
ALL_REDUCE = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
names = ("UNISONO_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "UNISONO_TRAVELS")
print(int(total), *(os.environ.get(name) for name in names), sys.argv[1:])
"""


def test_one_world_over_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, ALL_REDUCE)
    (tmp_path / "hostfile").write_text("# two\nnode0 slots=1\nnode1 slots=2\n")
    words = ["a b", "it's;", "$(touch hacked)", '"']
    arguments = ("--verbose", "-hostfile", "hostfile", "--output-filename", "logs", "script.py", *words)
    done = _run(hosts, tmp_path, *arguments, anew=True).finish()
    assert done.returncode == 0, done.stderr
    places = ["node0 0 1", "node1 0 2", "node1 1 2"]
    lines = [f"6 {place} {ADDRESSES[0]} yes {words}" for place in places]
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {line}" for rank, line in enumerate(lines)]
    assert (tmp_path / "logs" / "rank.2").read_text() == lines[2] + "\n"
    assert not (tmp_path / "hacked").exists()
    output = done.stderr.splitlines()
    assert output[0].startswith("preflight of 2 host(s), 3 ranks, in ")
    assert output[1].startswith("  node0: ok, ranks 0-0, python 3.")
    assert output[2].startswith("  node1: ok, ranks 1-2, python 3.")
    assert output[3] == "connections (row to column):"
    assert all(len(re.findall(r"\d+\.\d\d ms", line)) == 2 for line in output[5:7])


WAITS = """
import os, pathlib, time
import unisono as uni
comm = uni.init()
pathlib.Path(f"secret.{comm.rank}.new").write_text(f"{os.environ['UNISONO_SECRET_FILE']} {os.getpid()} {os.getppid()}")
os.rename(f"secret.{comm.rank}.new", f"secret.{comm.rank}")
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""


def test_the_secret_reaches_other_hosts_unseen_and_the_job_listens_where_they_know_it(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Over ssh's stdin: no command line and no variable has it, ssh's and those of the far host among them."""
    write_script(tmp_path, WAITS)
    run = _run(hosts, tmp_path, "-H", "node0:1,node1:1", "script.py", anew=True)
    with run.started() as process:
        for rank in range(2):
            wait_for(tmp_path / f"secret.{rank}", process, patience=120)
        told = [(tmp_path / f"secret.{rank}").read_text().split() for rank in range(2)]
        paths = [Path(path) for path, *_ in told]
        assert paths[0] != paths[1]  # each host has a file of its own
        (hidden,) = {path.read_bytes() for path in paths}
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
        for each in Path("/proc").glob("[0-9]*"):  # of both hosts
            for shown in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    assert hidden not in (each / shown).read_bytes(), each
        own = [process.pid, *(int(pid) for _, *pids in told for pid in pids)]  # launcher, ranks and their agents
        found = {str(address) for pid in own for address in listening(pid).values()}
        (tmp_path / "go").touch()
        assert process.wait(timeout=120) == 0
    assert ADDRESSES[0] in found  # the store
    assert found <= {*ADDRESSES, "127.0.0.1"}, found
    assert not any(path.exists() for path in paths)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "hosts.md"
ON_PAGE = re.search(r"<!-- not run: .*test_remote.py.* -->\n```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
TRAIN = """
import sys
import torch
import unisono as uni
comm = uni.init()
print(comm.size, int(comm.all_reduce(torch.ones(1))), sys.argv[1:])
"""


@pytest.mark.parametrize("command", ON_PAGE.group(1).splitlines() if ON_PAGE else [])
def test_the_pages_commands(hosts: Hosts, tmp_path: Path, command: str) -> None:
    write_script(tmp_path, TRAIN, "train.py")
    (tmp_path / "hosts").write_text("node0 slots=4\nnode1 slots=4\n")
    program, *words = shlex.split(command, comments=True)
    output = f"8 8 {words[words.index('train.py') + 1 :]}"
    if program == "unisono":
        done = _run(hosts, tmp_path, *words[1:]).finish()
        assert sorted(done.stdout.splitlines()) == [f"[{rank}] {output}" for rank in range(8)], done.stderr
    elif not mpi_ranks.MPIEXEC.exists():
        pytest.skip(f"no mpiexec at {mpi_ranks.MPIEXEC}; run make setup")
    else:
        assert run_mpiexec(shlex.join([program, *words]), 8, tmp_path).text.splitlines() == [output] * 8


@pytest.mark.thorough
def test_this_host_needs_no_ssh(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, ALL_REDUCE)
    done = _run(hosts, tmp_path, "-H", "localhost:1,node1:1", "script.py").finish()
    assert done.returncode == 0, done.stderr
    hosts_seen = ["localhost 0 1", "node1 0 1"]
    lines = [f"[{rank}] 3 {seen} {ADDRESSES[0]} yes []" for rank, seen in enumerate(hosts_seen)]
    assert sorted(done.stdout.splitlines()) == lines


FAILS = """
import os, subprocess, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
subprocess.Popen(["setsid", "sleep", "1000"])
if dist.get_rank() == int(sys.argv[1]) and os.environ["UNISONO_ATTEMPT"] < sys.argv[2]:
    raise ValueError("far away")
dist.all_reduce(torch.ones(1))
print("well", os.environ["UNISONO_ATTEMPT"])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 3])
def test_the_first_failure_names_its_host(hosts: Hosts, tmp_path: Path, rank: int) -> None:
    write_script(tmp_path, FAILS)
    done = _run(hosts, tmp_path, "-H", "node0:2,node1:2", "script.py", str(rank), "9").finish()
    assert (done.returncode, done.stdout) == (1, "")
    host = "node0" if rank < 2 else "node1"
    assert done.stderr.startswith(f"rank {rank} failed on host {host} (exit code 1):\nTraceback")
    assert done.stderr.endswith("ValueError: far away\n")
    assert done.stderr.count("Traceback") == 1


@pytest.mark.thorough
def test_all_hosts_restart_when_one_fails(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, FAILS)
    arguments = ("--max-restarts", "2", "-H", "node0:1,node1:2", "script.py", "2", "2")
    done = _run(hosts, tmp_path, *arguments).finish()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] well 2" for rank in range(3)]
    assert done.stderr.splitlines() == [
        f"restart {i} of 2: rank 2 failed on host node1 (exit code 1): ValueError: far away" for i in (1, 2)
    ]


STAYS = """
import os, pathlib, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", "sleep", "1000"])
pathlib.Path("up." + os.environ["RANK"] + ".tmp").write_text(str(os.getpid()))
os.rename("up." + os.environ["RANK"] + ".tmp", "up." + os.environ["RANK"])
time.sleep(1000)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_on_any_host(hosts: Hosts, tmp_path: Path, signum: signal.Signals) -> None:
    write_script(tmp_path, STAYS)
    run = _run(hosts, tmp_path, "-H", "node0:1,node1:1", "script.py")
    with run.started() as process:
        for rank in range(2):
            wait_for(tmp_path / f"up.{rank}", process)
        ranks = [int((tmp_path / f"up.{rank}").read_text()) for rank in range(2)]
        assert all(map(is_alive, ranks))
        assert len(run.running()) >= 3  # the launcher and what the two ranks started, at least
        os.kill(process.pid, signum)
        process.communicate(timeout=30)
        assert run.left_running() == []
        for rank in ranks:
            await_end(rank, patience=10)


@pytest.mark.parametrize(
    ("host", "output"),
    [
        ("no-such-host.invalid", "its name does not resolve"),
        ("nodaemon", "ssh refused"),
        ("stranger", "ssh key rejected"),
        ("silent", "no network route|ssh timed out|no answer within"),
        ("unknownkey", "its ssh host key is not known here"),
    ],
)
def test_preflight_names_the_cause(hosts: Hosts, tmp_path: Path, host: str, output: str) -> None:
    write_script(tmp_path, "open('started', 'w')")
    arguments = ("--start-timeout", "30", "-H", f"node1:1,{host}:1", "script.py")
    done = _run(hosts, tmp_path, *arguments).finish()
    assert (done.returncode, done.stdout) == (1, "")
    head, *causes = done.stderr.splitlines()
    assert head == "unisono: preflight failed, nothing was started:"
    assert len(causes) == 1
    assert re.match(rf"  {host}: .*({output})", causes[0])
    assert not (tmp_path / "started").exists()


def test_preflight_names_every_host_that_fails(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, "")
    done = _run(hosts, tmp_path, "--verbose", "-H", "nodaemon:1,node1:1,stranger:1", "script.py").finish()
    assert done.returncode == 1
    causes = done.stderr.splitlines()[-2:]
    assert causes[0].startswith("  nodaemon: ssh refused")
    assert causes[1].startswith("  stranger: ssh key rejected")
    assert "  node1: ok, ranks 1-1" in done.stderr


def test_no_python_there(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, "")
    done = _run(hosts, tmp_path, "--python", "/nowhere/python", "-H", "node1:1", "script.py").finish()
    assert done.returncode == 1
    assert done.stderr.endswith("  node1: no python at /nowhere/python there; give its path with --python\n")


@pytest.mark.thorough
def test_a_python_without_unisono_or_with_another_version(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, "")
    bare = tmp_path / "bare"
    subprocess.run([_base_python(), "-m", "venv", "--without-pip", str(bare)], check=True)
    python = str(bare / "bin" / "python")
    alone = write_script(tmp_path, f'#!/bin/sh\nPYTHONPATH= PYTHONDONTWRITEBYTECODE=1 exec {python} "$@"\n', "alone")
    alone.chmod(0o755)
    done = _run(hosts, tmp_path, "--python", str(alone), "-H", "node1:1", "script.py").finish()
    assert done.stderr.endswith("  node1: unisono is not installed for its python\n")
    site = next((bare / "lib").glob("python3*")) / "site-packages"
    shutil.copytree(Path(unisono.__file__).parent, site / "unisono")
    done = _run(hosts, tmp_path, "--python", str(alone), "-H", "node1:1", "script.py").finish()
    assert re.search(r"  node1: torch is not installed for its python \(3\.[\d.]+\)\n$", done.stderr)
    (site / "unisono" / "__init__.py").write_text("__version__ = '0.0.1'")
    _pretend_torch(site)
    arguments = ("--python", str(alone), "-H", "localhost:1,node1:1", "script.py")
    done = _run(hosts, tmp_path, *arguments).finish()
    here = unisono.__version__
    assert done.stderr.endswith(f"  node1: unisono 0.0.1 there, but {here} on localhost: install the same\n")
    (site / "unisono" / "__init__.py").write_text(f"__version__ = '{here}'")
    done = _run(hosts, tmp_path, *arguments).finish()
    assert re.search(r"  node1: torch 1\.0 there, but \S+ on localhost: install the same\n$", done.stderr)


def test_the_script_must_be_there(hosts: Hosts, tmp_path: Path) -> None:
    # what the launcher's host sees and the far host does not: a mount of this namespace's own
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    shown = tmp_path / "shown"
    shown.mkdir()
    write_script(shown, "open('started', 'w')")
    run = _run(hosts, tmp_path, "-H", "node1:1", "hidden/script.py", anew=True)
    run.before = [
        *hosts.inside,
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount --bind {shown} {hidden} && exec "$@"',
        "sh",
    ]
    done = run.finish()
    assert done.returncode == 1
    assert done.stderr.endswith(f"  node1: the script {hidden}/script.py does not exist\n")


def test_a_taken_master_port(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, "import os; print(os.environ['UNISONO_STORE'].split()[1])")
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
        done = Run(["run", "-n", "1", "--master-port", port, "script.py"], tmp_path).finish()
        assert done.returncode == 1
        assert f"localhost: the master port {port} cannot be used: Address already in use;" in done.stderr
    done = _run(hosts, tmp_path, "-H", "node1:1", "--master-port", port, "script.py").finish()
    assert (done.returncode, done.stdout) == (0, f"[0] {port}\n")


def test_a_master_that_others_cannot_reach(hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, "open('started', 'w')")
    done = _run(hosts, tmp_path, "--verbose", "-H", "loop:1,node1:1", "script.py").finish()
    assert done.returncode == 1
    assert re.search(
        r"  node1: cannot reach loop at 127\.0\.0\.1 port \d+: connection refused;",
        done.stderr.splitlines()[-1],
    )
    assert re.search(r"\n +node1 +connection refused +\d+\.\d\d ms\n", done.stderr)
    assert not (tmp_path / "started").exists()


MPI_SCRIPT = """
import os
from mpi4py import MPI
names = ("UNISONO_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print(MPI.COMM_WORLD.allreduce(1), *(os.environ[name] for name in names))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("flavour", list(WHERE))
def test_mpi_over_two_hosts(hosts: Hosts, tmp_path: Path, flavour: str) -> None:
    pytest.importorskip("mpi4py")
    if not WHERE[flavour].exists():
        pytest.skip(f"{flavour} is not installed at {WHERE[flavour]}")
    write_script(tmp_path, MPI_SCRIPT)
    arguments = ("--backend", "mpi", "-H", "node0:1,node1:2", "script.py")
    listened = set()  # where the launcher did, until all ranks had greeted it
    with _run(hosts, tmp_path, *arguments, anew=True, UNISONO_MPIEXEC=str(WHERE[flavour])).started() as process:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                listened |= set(map(str, listening(process.pid).values()))
            time.sleep(0.05)
        out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert sorted(out.splitlines()) == ["[0] 3 node0 0 1", "[1] 3 node1 0 2", "[2] 3 node1 1 2"]
    assert listened == {ADDRESSES[0]}


def _base_python() -> str:
    return os.path.realpath(sys.executable)


def _pretend_torch(site: Path) -> None:
    """As the interpreter would see another version installed."""
    info = site / "torch-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
