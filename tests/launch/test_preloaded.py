"""MPI ranks of a host are forked from one process that has imported torch, and end when it or a stand-in is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launch.harness import Run, wait_for, write_script
from tests.launch.test_mpi import WHERE
from unisono.launch.worker import process_tree

SCRIPT = """
import os, pathlib, sys, time
assert "torch" in sys.modules  # before any import of the program's own
assert sorted(os.sched_getaffinity(0)) == sorted(map(int, sys.argv[1].split(",")))
import unisono as uni
comm = uni.init()
comm.barrier()
made = pathlib.Path(f"made.{comm.rank}")
made.write_text(f"{os.getpid()} {os.environ.get('OMP_NUM_THREADS')} {os.getcwd()}")
made.rename(f"up.{comm.rank}")
time.sleep(1000)
"""


@pytest.fixture(params=list(WHERE))
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    pytest.importorskip("mpi4py")
    if not WHERE[request.param].exists():
        pytest.skip(f"{request.param} is not installed")
    return {"UNISONO_MPIEXEC": str(WHERE[request.param])}


@pytest.mark.parametrize("killed", ["preloaded", pytest.param("stand-in", marks=pytest.mark.thorough)])
def test_all_ranks_come_from_one_process_and_end_with_it(
    tmp_path: Path, variables: dict[str, str], killed: str
) -> None:
    write_script(tmp_path, SCRIPT)
    cpus = ",".join(map(str, os.sched_getaffinity(0)))
    words = ["run", "-n", "3", "--backend", "mpi", "--env", "OMP_NUM_THREADS=2", "script.py", cpus]
    run = Run(words, tmp_path, variables)
    with run.started() as process:
        for rank in range(3):
            wait_for(tmp_path / f"up.{rank}", process)
        found = [(tmp_path / f"up.{rank}").read_text().split() for rank in range(3)]
        assert [(threads, folder) for _, threads, folder in found] == [("2", str(tmp_path))] * 3
        agents, preloaded = zip(*(process_tree.ancestors(int(pid))[:2] for pid, *_ in found), strict=True)
        assert len(set(agents)) == 3
        assert len(set(preloaded)) == 1
        words = [sys.executable, "-P", "-m", "unisono.launch.agent.preloaded", ""]
        stand_ins = [pid for pid in run.running() if Path(f"/proc/{pid}/cmdline").read_text().split("\0") == words]
        assert len(stand_ins) == 3
        os.kill(preloaded[0] if killed == "preloaded" else stand_ins[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert process.returncode not in (0, 2), errors
        assert errors
        assert run.left_running() == []
