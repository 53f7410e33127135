"""What does not answer is reported: a stopped rank that holds the store, a stopped agent, a rank in native code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.harness import Run, write_script

STOPS = """
import os, re, signal, sys, time
import torch
import unisono as uni
comm = uni.init()
x = torch.ones(4)
comm.all_reduce(x)
time.sleep(2)  # its watchdog has told the others where it is
if sys.argv[1] == "native" and comm.rank == 2:
    re.fullmatch("(a+)+", "a" * 60 + "b")
elif sys.argv[1] == "leaves":
    comm.rank == 2 and sys.exit(0)
elif comm.rank == 0 and sys.argv[1] != "native":
    os.kill(os.getpid() if sys.argv[1] == "rank" else os.getppid(), signal.SIGSTOP)
if comm.rank == 0 and sys.argv[1] == "agent":
    time.sleep(1000)
comm.all_reduce(x)
time.sleep(1000)
"""


def run(tmp_path: Path, backend: str, which: str) -> str:
    if backend == "mpi":
        pytest.importorskip("mpi4py")
    write_script(tmp_path, STOPS)
    done = Run(["run", "-n", "3", "--backend", backend, "--timeout", "3", "script.py", which], tmp_path).finish(120)
    assert done.returncode == 75, done
    return done.stderr


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.thorough), "mpi"])
def test_rank_0_is_stopped(tmp_path: Path, backend: str) -> None:
    """Over MPI it held the store once, and requests to that never returned."""
    words = run(tmp_path, backend, "rank")
    assert "in all_reduce #2 float32[4] at script.py:17; rank 0 has been stopped" in words


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.thorough)])
def test_an_agent_is_stopped(tmp_path: Path, backend: str) -> None:
    ranks = "ranks 0, 1, 2" if backend == "gloo" else "rank 0"
    assert f"the agent of {ranks} on host localhost has been stopped" in run(tmp_path, backend, "agent")


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.thorough)])
def test_the_line_of_a_rank_in_native_code_is_named(tmp_path: Path, backend: str) -> None:
    """Which lets no thread of Python's run there. Of MPI's operations no note is kept outside the process."""
    sentence = "rank 2 does not answer (busy in native code at script.py:10)"
    sentence += "; last began all_reduce #1" if backend == "gloo" else ""
    assert sentence in run(tmp_path, backend, "native")


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.thorough)])
def test_the_line_of_sys_exit_is_named(tmp_path: Path, backend: str) -> None:
    assert "rank 2 has exited by sys.exit(0) at script.py:12" in run(tmp_path, backend, "leaves")
