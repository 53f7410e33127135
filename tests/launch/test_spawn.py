from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unisono as uni
from tests.launch.harness import write_script
from unisono.errors import LaunchError, UsageError
from unisono.launch.worker import rank_main


def total(start: float) -> tuple[int, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.full((2,), start + dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), value


def mpi_total(start: int) -> tuple[int, int]:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.allreduce(start + MPI.COMM_WORLD.rank)


def test_results_by_rank() -> None:
    results = uni.spawn(total, 3, args=(1.0,))
    assert [(rank, value.tolist()) for rank, value in results] == [(rank, [6.0, 6.0]) for rank in range(3)]


def policies(of: str = "") -> list[int]:
    """Of the threads of that name, or of all."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may have ended since it was listed
            if of in (thread / "comm").read_text():
                found.append(os.sched_getscheduler(int(thread.name)))
    return found


def test_gloos_threads_do_not_interrupt_their_rank() -> None:
    """Of torch before 2.13 gloo's threads have the rank's own name, as others of it do."""
    are_named = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

    def body() -> tuple[list[int], bool, list[int]]:
        before = os.sched_getscheduler(0)
        own = "gloo_tcp_loop" if are_named else Path("/proc/self/comm").read_text()
        comm = uni.init()
        world, is_as_before = policies(own), os.sched_getscheduler(0) == before
        comm.subgroup([0, 1]).barrier()
        return world, is_as_before, policies(own)

    for world, is_as_before, with_group in uni.spawn(body, 2):
        assert is_as_before
        assert set(world) == set(with_group) == ({os.SCHED_BATCH} if are_named else {os.SCHED_BATCH, os.SCHED_OTHER})
        assert with_group.count(os.SCHED_BATCH) > world.count(os.SCHED_BATCH)


def test_ranks_that_share_cores_do_not_interrupt_each_other() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert [set(found) for found in uni.spawn(policies, 2)] == [{os.SCHED_BATCH}] * 2
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.thorough
def test_after_torch_has_computed_with_threads_here(tmp_path: Path) -> None:
    """In a process with several threads, as tests have one. A rank would wait for threads that the fork left behind, or
    make some of its own, though it shares the machine with others."""
    script = write_script(
        tmp_path,
        "import os, torch\n"
        "import unisono as uni\n"
        "def rank():\n"
        "    before = os.listdir('/proc/self/task')\n"
        "    return work(), set(os.listdir('/proc/self/task')) - set(before)\n"
        "def work():\n"
        "    weight = torch.ones(512, 512)\n"
        "    return float(torch.nn.functional.linear(torch.ones(256, 512), weight, torch.ones(512)).sum())\n"
        "if __name__ == '__main__':\n"
        "    assert work() == work()\n"
        "    print(uni.spawn(rank, 2, timeout=60))\n",
    )
    variables = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90, env=variables)
    assert (done.returncode, done.stdout) == (0, f"{[(256.0 * 512 * 513, set())] * 2}\n"), done.stderr


def test_ranks_have_what_was_open_here_and_not_spawns_store() -> None:
    def body() -> dict[int, str]:
        return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in rank_main.open_descriptors() if fd > 2}

    with open(os.devnull) as kept:
        before = rank_main.open_descriptors()
        for found in uni.spawn(body, 2):
            assert found[kept.fileno()] == os.devnull
            new = {link.partition(":")[0] for fd, link in found.items() if fd not in before}
            assert not new & {"socket", "anon_inode"}, found


def test_no_rank_begins_before_the_last_is_forked() -> None:
    """The store's thread looks up the names of those who connect, under a lock that a rank forked then never gets."""

    def body() -> tuple[float, float]:
        begun = time.clock_gettime(time.CLOCK_BOOTTIME)
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return ticks / os.sysconf("SC_CLK_TCK"), begun

    times = uni.spawn(body, 8)
    assert max(forked for forked, _ in times) <= min(begun for _, begun in times)


def test_closures_large_results_and_output(capsys: pytest.CaptureFixture[str]) -> None:
    local = {"x": 7}

    def body() -> tuple[int, bytes]:
        print("hello", local["x"])
        return os.getpid(), b"r" * 3_000_000

    results = uni.spawn(body, 2)
    assert len({pid for pid, _ in results} | {os.getpid()}) == 3
    assert all(len(data) == 3_000_000 for _, data in results)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] hello 7", "[1] hello 7"]


def test_an_exception_comes_back_with_its_traceback() -> None:
    def body() -> None:
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("by hand")
        time.sleep(100)

    with pytest.raises(LaunchError) as raised:
        uni.spawn(body, 2)
    text = str(raised.value)
    assert text.startswith("rank 1 failed (exit code 1):\nTraceback")
    assert f'File "{__file__}", line ' in text.splitlines()[2]
    assert text.endswith("ZeroDivisionError: by hand")


def test_a_rank_that_dies_and_one_that_is_late() -> None:
    with pytest.raises(LaunchError, match="exit code 5"):
        uni.spawn(lambda: os._exit(5), 2)
    with pytest.raises(LaunchError, match=r"rank 0, 1 still ran after the timeout of 0.5 s"):
        uni.spawn(lambda: time.sleep(100), 2, timeout=0.5)


class Unreadable:
    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("x",)


OF_GARBAGE = """
import gc, sys
import torch.distributed as dist
import unisono as uni

class Cycle: pass

def collect():
    uni.init()
    return gc.collect() * 0 + uni.rank()

gc.disable()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
cycle = Cycle()
cycle.own, cycle.group = cycle, dist.group.WORLD
dist.destroy_process_group()
del cycle
print(uni.spawn(collect, 2, timeout=30))
"""


@pytest.mark.thorough
def test_a_process_group_that_is_garbage_here_is_not_destroyed_in_ranks(tmp_path: Path) -> None:
    """Its threads are this process's: a rank that joined them would wait forever, or crash."""
    script = write_script(tmp_path, OF_GARBAGE)
    done = subprocess.run([sys.executable, script, str(tmp_path / "store")], capture_output=True, text=True)
    assert done.stdout == "[0, 1]\n", done.stderr


def test_a_process_that_is_in_a_world_itself() -> None:
    """As a notebook is after `fit`: the ranks meet in a world of their own, and this process stays in its own."""
    here = uni.init()

    def met() -> tuple[int, float]:
        comm = uni.init()
        return comm.size, float(comm.all_reduce(torch.ones(())))

    assert uni.spawn(met, 2, timeout=60) == [(2, 2.0)] * 2
    assert uni.world() is here
    assert here.all_gather_object("alone") == ["alone"]


def test_a_rank_without_a_result_and_one_with_an_unreadable_one() -> None:
    def body() -> None:
        if os.environ["RANK"] == "1":
            os._exit(0)

    with pytest.raises(LaunchError, match="rank 1 ended without a result; the function must return"):
        uni.spawn(body, np.int64(2))  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"result of rank 0 cannot be unpickled here .ValueError: invalid"):
        uni.spawn(Unreadable, 1)


def test_what_spawn_refuses() -> None:
    for bad in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="at least 1"):
            uni.spawn(total, bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not 3"):
        uni.spawn(3, 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'smoke' is unknown"):
        uni.spawn(total, 2, backend="smoke")
    for wrong in (0, "soon"):
        with pytest.raises(UsageError, match="above 0"):
            uni.spawn(total, 2, timeout=wrong)  # type: ignore[arg-type]
    for odd in (5, "abc"):
        with pytest.raises(UsageError, match="expected a tuple"):
            uni.spawn(total, 2, args=odd)  # type: ignore[arg-type]


def test_after_cuda_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="initialised CUDA"):
        uni.spawn(total, 2, args=(1.0,))


@pytest.mark.gpu
@pytest.mark.parametrize(("imports", "expected"), [("unisono, torch", "[1.0]"), ("torch", "had initialised CUDA")])
def test_after_a_look_for_gpus(imports: str, expected: str) -> None:
    """torch.cuda.is_available() leaves CUDA alone once unisono is imported; otherwise forked ranks are refused."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    program = (
        f"import {imports}; torch.cuda.is_available(); import unisono\n"
        "print(unisono.spawn(lambda: unisono.init().all_reduce(torch.ones(1, device='cuda')).item(), 1))"
    )
    environment = {name: value for name, value in os.environ.items() if "NVML_BASED" not in name}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert expected in ended.stdout + ended.stderr


@pytest.mark.thorough
def test_over_mpi() -> None:
    pytest.importorskip("mpi4py")
    assert uni.spawn(mpi_total, 3, backend="mpi", args=(1,)) == [(0, 6), (1, 6), (2, 6)]
    with pytest.raises(LaunchError, match=r"rank \d failed(.|\n)*TypeError"):
        uni.spawn(mpi_total, 2, backend="mpi")
    with pytest.raises(UsageError, match="cannot be pickled"):
        uni.spawn(lambda: 1, 2, backend="mpi")
    with pytest.raises(LaunchError, match="still ran after the timeout of 1 s"):
        uni.spawn(time.sleep, 2, backend="mpi", args=(100,), timeout=1)


@pytest.mark.thorough
def test_over_mpi_from_a_script(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    script = write_script(
        tmp_path,
        "import unisono as uni\n"
        "def work(x):\n"
        "    from mpi4py import MPI\n"
        "    return x + MPI.COMM_WORLD.rank\n"
        "if __name__ == '__main__':\n"
        "    print(uni.spawn(work, 2, backend='mpi', args=(10,)))\n",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "[10, 11]\n"), done.stderr


@pytest.mark.thorough
def test_from_a_process_that_has_initialized_mpi(tmp_path: Path) -> None:
    """As Lightning's Trainer does, to ask whether it runs under MPI: forked ranks leave it to their parent."""
    script = tmp_path / "script.py"
    script.write_text("from mpi4py import MPI\nimport unisono as uni\nprint(uni.spawn(lambda: uni.init().rank, 2))\n")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, ["[0, 1]"]), ran.stdout + ran.stderr
