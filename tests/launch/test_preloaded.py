"""Ranks are forked from a process that has imported what they need. MPI ranks of a host end when it is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launch.harness import Run, wait_for, write_script
from tests.launch.test_mpi import WHERE
from unisono.launch import job
from unisono.launch.agent.connection import Stopped
from unisono.launch.worker import preload, process_tree

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


PRESENT = """
import sys
present = [name in sys.modules for name in ("torch.distributed", "unisono.train.engine", "torch._dynamo", "sympy")]
print("present", *present, flush=True)
import unisono as uni
uni.init()
uni.shutdown()
"""
COMMUNICATES = "present True False False False"
TRAINS = "present True True True True"


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize(
    ("more", "options", "output"),
    [
        ("", [], COMMUNICATES),
        ("if 0: uni.Engine(None)", [], TRAINS),
        ("if 0: uni.parallelize(None)", ["-m"], TRAINS),
        pytest.param("if 0: uni.Engine(None)  # TORCH_LOGS", [], COMMUNICATES, marks=pytest.mark.thorough),
        ("if 0: uni.Engine(None)", ["-x", "TORCHDYNAMO_DISABLE=1"], COMMUNICATES),
    ],
)
def test_what_a_training_rank_imports_is_there_before_the_fork(
    tmp_path: Path, backend: str, more: str, options: list[str], output: str
) -> None:
    if backend == "mpi":
        pytest.importorskip("mpi4py")
    write_script(tmp_path, PRESENT + more)
    target = "script" if "-m" in options else "script.py"
    done = Run(["run", "-n", "2", "--backend", backend, *options, target], tmp_path, anew=True).finish()
    assert (done.returncode, done.stderr) == (0, ""), done
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {output}" for rank in range(2)]


def test_which_programs_train(tmp_path: Path) -> None:
    def is_wanted(text: str) -> bool:
        (tmp_path / "program.py").write_text(text)
        return preload.is_wanted(job.Entrypoint(job.SCRIPT, "program.py", (), str(tmp_path)), {})

    assert is_wanted("import unisono as uni\nuni.Engine(model)")
    assert is_wanted("from unisono import init, parallelize")
    assert not is_wanted("import unisono as uni\nuni.init()")
    assert not is_wanted("class Engine: ...\nimport unisono as uni\nuni.init()")
    assert not is_wanted("unisono " * (1 << 17))  # a search that begins anew at each would take hours


def test_a_request_to_stop_ends_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of signals raises it: it was taken for a module that cannot be imported, and the job went on."""

    def import_module(name: str) -> None:
        raise Stopped

    monkeypatch.setattr(preload.importlib, "import_module", import_module)
    with pytest.raises(Stopped):
        preload.load()
