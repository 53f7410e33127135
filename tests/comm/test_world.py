"""Joining and leaving the world, each way there is, in real processes."""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono as uni
from tests.processes import End, run_forked
from tests.ranks import free_port
from unisono.errors import CommError, UsageError


def join_and_sum(**arguments: Any) -> None:
    comm = uni.init(**arguments)
    x = torch.tensor([float(comm.rank + 1)])
    dist.all_reduce(x)  # the default group is the same world
    comm.all_reduce(x)
    assert uni.rank() == comm.rank == dist.get_rank()
    assert uni.world_size() == comm.size == dist.get_world_size()
    print(f"{comm.rank}/{comm.size} local {comm.local_rank}/{comm.local_size} {comm.backend} sum {x.item():g}")
    uni.shutdown()
    assert not uni.is_initialized()
    assert not dist.is_initialized()


def in_environment(variables: dict[str, str], job: Callable[[], None]) -> None:
    os.environ.update(variables)
    job()


def outputs(ends: list[End]) -> list[str]:
    assert [end.code for end in ends] == [0] * len(ends), ends
    return [end.output.strip() for end in ends]


EXPECTED = ["0/2 local 0/2 gloo sum 6", "1/2 local 1/2 gloo sum 6"]


def test_tcp(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    jobs = [functools.partial(join_and_sum, init_method=url, rank=r, world_size=2) for r in range(2)]
    assert outputs(run_forked(jobs, tmp_path)) == EXPECTED


def show_listeners(**arguments: Any) -> None:
    comm = uni.init(**arguments)
    inodes = {os.path.realpath(f"/proc/self/fd/{each}").rpartition("/")[2] for each in os.listdir("/proc/self/fd")}
    tables = [Path("/proc/net", name) for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    own = {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
    wild = {each for each in own if not each.partition(":")[0].strip("0")}
    comm.barrier()
    print("listens on every interface" if wild or not own else "listens on loopback alone")
    uni.shutdown()


def test_the_store_of_ranks_on_one_host_is_not_reached_from_others(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    jobs = [functools.partial(show_listeners, init_method=url, rank=r, world_size=2) for r in range(2)]
    assert outputs(run_forked(jobs, tmp_path))[0] == "listens on loopback alone"


def join_again_and_again(url: str, rank: int) -> None:
    """Whichever rank comes first; the world before is still in somebody's hands, and its store with it."""
    known = []
    for time_round in range(3):
        if rank == time_round % 2:
            time.sleep(0.3)
        known.append(uni.init(init_method=url, rank=rank, world_size=2, timeout=20))
        known[-1].all_reduce(torch.ones(1))
        print(f"joined {time_round}")
        uni.shutdown()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_the_same_ranks_meet_again_at_the_same_place(tmp_path: Path, kind: str) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meet"
    jobs = [functools.partial(join_again_and_again, url, rank) for rank in range(2)]
    assert outputs(run_forked(jobs, tmp_path)) == ["joined 0\njoined 1\njoined 2"] * 2
    assert not list(tmp_path.glob("meet*"))


def test_file_and_its_staleness(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meet"
    jobs = [functools.partial(join_and_sum, init_method=url, rank=r, world_size=2) for r in range(2)]
    assert outputs(run_forked(jobs, tmp_path)) == EXPECTED

    # A job that was killed leaves its file; one that follows, of any size, gets an error on every rank.
    killed = [functools.partial(join_and_die, init_method=url, rank=r, world_size=2) for r in range(2)]
    assert [end.code for end in run_forked(killed, tmp_path)] == [-signal.SIGKILL] * 2
    assert (tmp_path / "meet").exists()
    for size in (2, 3):
        again = [functools.partial(join_and_sum, init_method=url, rank=r, world_size=size) for r in range(size)]
        for end in run_forked(again, tmp_path):
            assert end.code == 1
            assert "was left by an earlier job" in end.output
            assert "delete it or name another file" in end.output


def join_and_die(**arguments: Any) -> None:
    uni.init(**arguments).barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_environment(tmp_path: Path, launcher: str) -> None:
    port = str(free_port())
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    jobs = []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2"}
        if launcher == "srun":
            variables = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": str(rank)}
        jobs.append(functools.partial(in_environment, variables | meet, join_and_sum))
    assert outputs(run_forked(jobs, tmp_path)) == EXPECTED


def test_alone(tmp_path: Path) -> None:
    assert outputs(run_forked([join_and_sum], tmp_path)) == ["0/1 local 0/1 gloo sum 1"]


def join_twice() -> None:
    first = uni.init()
    with pytest.raises(CommError, match=r"joined already .*call uni.shutdown\(\)"):
        uni.init()
    assert uni.world() is first
    uni.shutdown()
    assert uni.init().size == 1
    uni.shutdown()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    with pytest.raises(CommError, match=r"torch.distributed is initialised already"):
        uni.init()


def test_a_second_init_is_an_error_and_an_init_after_shutdown_is_not(tmp_path: Path) -> None:
    outputs(run_forked([join_twice], tmp_path))


def test_bad_input_is_an_error_before_anyone_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="backend 'glow' is unknown; use one of gloo, nccl, mpi"):
        uni.init("glow")
    with pytest.raises(UsageError, match="positive number of seconds"):
        uni.init(timeout=0)
    with pytest.raises(UsageError, match="timeout=inf: expected a positive number of seconds, 1e\\+09 at most"):
        uni.init(timeout=float("inf"))
    with pytest.raises(UsageError, match="timeout='soon': expected a number of seconds"):
        uni.init(timeout="soon")  # type: ignore[arg-type]
    for wrong in ({"rank": "0", "world_size": 2}, {"rank": 0.0, "world_size": 2}, {"rank": 0, "world_size": 2.0}):
        with pytest.raises(UsageError, match="expected a whole number"):
            uni.init(init_method="tcp://127.0.0.1:9", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="init_method 5: expected"):
        uni.init(init_method=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not exist; make it first"):
        uni.init(init_method=f"file://{tmp_path}/no/meet", rank=0, world_size=2)
    with pytest.raises(UsageError, match="that is a folder"):
        uni.init(init_method=f"file://{tmp_path}", rank=0, world_size=2)
    with pytest.raises(CommError, match="not joined the world yet"):
        uni.world()
    if not torch.cuda.is_available():
        with pytest.raises(CommError, match="backend nccl: "):
            uni.init("nccl")
    with pytest.raises(CommError, match="not started by mpiexec"):
        uni.init("mpi", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT are not"):
        uni.init()
    assert (uni.rank(), uni.world_size(), uni.is_initialized()) == (0, 1, False)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CommError, match=f"cannot open {url}: the port is taken"):
            uni.init(init_method=url, rank=0, world_size=2)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    jobs = [functools.partial(join_and_sum, init_method=url, rank=r, world_size=4, timeout=3) for r in (0, 3)]
    ends = run_forked(jobs, tmp_path)
    assert any("missing: 1, 2" in end.output for end in ends), ends


def test_a_rank_given_twice_is_named(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    jobs = [functools.partial(join_and_sum, init_method=url, rank=r, world_size=3, timeout=50) for r in (0, 1, 1)]
    ends = run_forked(jobs, tmp_path)
    assert sum("rank 1 has registered before" in end.output for end in ends) >= 2, ends


def test_nobody_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(CommError, match="nobody answers there; is rank 0 running"):
        uni.init(init_method=f"tcp://127.0.0.1:{free_port()}", rank=1, world_size=2, timeout=1)


def test_importing_unisono_is_light() -> None:
    import subprocess

    probe = "import sys, unisono; print([m for m in ('torch', 'mpi4py', 'numba', 'jinja2') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).strip() == "[]"
