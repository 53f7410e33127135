"""However the launcher ends, nothing is left running."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.launch.harness import MARK, Run, wait_for, write_script
from unisono.launch.agent.elastic import NodeRendezvous
from unisono.launch.job import SCRIPT, Entrypoint, NodeJob
from unisono.launch.transport.link import AgentLink, AgentLinks, agent_command
from unisono.launch.worker import stacks

# Every rank ignores SIGTERM and has a child in a session of its own, whose parent then dies.
STAY = """
import os, pathlib, signal, subprocess, sys, time
rank = os.environ["RANK"]
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.run(["sh", "-c", "setsid sleep 1000 & exit 0"])
try:
    pathlib.Path(f"up.{rank}.new").write_text(str(os.getpid()))
    os.rename(f"up.{rank}.new", f"up.{rank}")  # whoever sees it may interrupt from here on
    time.sleep(1000)
except KeyboardInterrupt:
    pathlib.Path(f"interrupted.{rank}").touch()
    raise
"""


@pytest.fixture(params=["gloo", "mpi"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "mpi":
        pytest.importorskip("mpi4py")
    return str(request.param)


@pytest.mark.parametrize(
    ("signum", "how"),
    [
        (signal.SIGINT, "polite"),
        (signal.SIGINT, "stubborn"),
        (signal.SIGQUIT, "polite"),
        (signal.SIGTERM, "stubborn"),
        (signal.SIGKILL, "stubborn"),
    ],
)
def test_a_signal_to_the_launcher_ends_everything(
    tmp_path: Path, backend: str, signum: signal.Signals, how: str
) -> None:
    write_script(tmp_path, STAY)
    run = Run(["run", "-n", "2", "--backend", backend, "--json", "script.py", how], tmp_path)
    with run.started() as process:
        for rank in range(2):
            wait_for(tmp_path / f"up.{rank}", process)
        os.kill(process.pid, signum)
        printed, output = process.communicate(timeout=30)
        assert run.left_running(20) == []  # over MPI agents wait 8 s for each other once the launcher has gone
    if signum == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + signum
        assert output == f"stopped by {signum.name}; all ranks have ended\n"
        end = {"exit_code": 128 + signum, "restarts": 0, "failed_rank": None, "reason": output.strip()}
        assert json.loads(printed.splitlines()[-1]) == end
    interrupted = sorted(path.name for path in tmp_path.glob("interrupted.*"))
    assert interrupted == (["interrupted.0", "interrupted.1"] if how == "polite" else [])


def test_the_end_of_a_terminal_ends_nothing_under_nohup(tmp_path: Path) -> None:
    write_script(tmp_path, STAY)
    run = Run(["run", "-n", "2", "script.py", "polite"], tmp_path, before=["env", "--ignore-signal=HUP"])
    with run.started() as process:
        for rank in range(2):
            wait_for(tmp_path / f"up.{rank}", process)
        os.kill(process.pid, signal.SIGHUP)
        os.kill(process.pid, signal.SIGTERM)
        _, output = process.communicate(timeout=30)
    assert output == "stopped by SIGTERM; all ranks have ended\n"
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.thorough
def test_a_lost_agent_is_reported_and_its_ranks_end(tmp_path: Path) -> None:
    write_script(tmp_path, STAY)
    run = Run(["run", "-n", "2", "script.py", "stubborn"], tmp_path, anew=True)
    with run.started() as process:
        for rank in range(2):
            wait_for(tmp_path / f"up.{rank}", process)
        os.kill(_agent_of(process.pid), signal.SIGKILL)
        _, output = process.communicate(timeout=30)
        assert run.left_running() == []
    assert process.returncode == 1
    assert output == "the agent on host localhost was lost; its ranks are 0, 1\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.thorough)])
def test_a_signal_to_an_agent_is_not_success(tmp_path: Path, backend: str, signum: signal.Signals) -> None:
    write_script(tmp_path, STAY)
    run = Run(["run", "-n", "2", "--backend", backend, "--max-restarts", "1", "script.py", "polite"], tmp_path)
    with run.started() as process:
        for rank in range(2):
            wait_for(tmp_path / f"up.{rank}", process)
        rank = int((tmp_path / "up.0").read_text())
        os.kill(_parent_of(rank), signum)
        _, output = process.communicate(timeout=60)
        assert run.left_running() == []
    assert process.returncode == 128 + signum
    assert output == f"{signum.name} was sent to the agent on host localhost; its ranks have ended\n"


FITS = """
import os, pathlib, sys
import torch
import unisono as uni

class Signal(uni.Callback):
    def on_step(self, engine, info):
        up = f"up.{os.environ['RANK']}"
        if not os.path.exists(up):
            pathlib.Path(up + ".new").write_text(str(os.getpid()))
            os.rename(up + ".new", up)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
engine = uni.Engine(lambda: torch.nn.Linear(4, 1), torch.nn.functional.mse_loss,
                    lambda p: torch.optim.SGD(p, lr=0.01), plan="dp=2")
saves = {"save": "run"} if sys.argv[1] == "saves" else {}
history = engine.fit(data, batch_size=8, epochs=100000, callbacks=[Signal()], **saves)
print("went on after", history.stopped)
"""


@pytest.mark.parametrize("signum", [signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_ranks_of_an_agent_that_is_asked_to_stop_may_save(tmp_path: Path, backend: str, signum: signal.Signals) -> None:
    write_script(tmp_path, FITS)
    run = Run(["run", "-n", "2", "--backend", backend, "script.py", "saves"], tmp_path)
    with run.started() as process:
        wait_for(tmp_path / "up.1", process, patience=180)
        os.kill(_parent_of(int((tmp_path / "up.1").read_text())), signum)
        _, output = process.communicate(timeout=120)
        assert run.left_running() == []
    assert process.returncode == 75
    who = f"stopped by {signum.name} to the agent on host localhost"
    assert re.fullmatch(rf"{who}: fit ended after step \d+, saved in run/checkpoints", output.splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "code"), [("saves", 75), ("plain", 143)])
def test_a_rank_that_is_asked_to_stop_is_not_success(tmp_path: Path, backend: str, how: str, code: int) -> None:
    write_script(tmp_path, FITS)
    run = Run(["run", "-n", "2", "--backend", backend, "--max-restarts", "1", "script.py", how], tmp_path)
    with run.started() as process:
        wait_for(tmp_path / "up.1", process)
        os.kill(int((tmp_path / "up.1").read_text()), signal.SIGTERM)
        printed, output = process.communicate(timeout=60)
        assert run.left_running() == []
    assert printed.count("went on after asked to stop (SIGTERM)") == 2
    assert process.returncode == code
    assert "stopped by SIGTERM to a rank: fit ended after step " in output.splitlines()[-1]
    assert ("saved in run" in output.splitlines()[-1]) == (how == "saves")


def test_output_that_nobody_reads_any_more_ends_the_job(tmp_path: Path) -> None:
    write_script(tmp_path, "import time\nwhile True:\n    print('more')\n    time.sleep(0.01)\n")
    run = Run(["run", "-n", "2", "script.py"], tmp_path)
    with run.started() as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("more\n")
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE
        assert run.left_running() == []
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_what_a_finished_job_left_running_is_swept(tmp_path: Path) -> None:
    write_script(tmp_path, "import subprocess; subprocess.Popen(['setsid', 'sleep', '1000'])")
    run = Run(["run", "-n", "1", "script.py"], tmp_path)
    assert run.finish().returncode == 0


def _parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _agent_of(launcher: int) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


# Every rank takes three seconds to save what it has when it is asked to go; longer than the default grace period.
SAVE = """
import os, pathlib, signal, sys, time
from unisono.launch.outcome import failure
rank = os.environ["RANK"]

def save(signum, frame):
    time.sleep(3)
    pathlib.Path(f"saved.{rank}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
failure.request_grace(20)
pathlib.Path(f"up.{rank}").touch()
while True:
    time.sleep(0.1)
"""


def test_ranks_with_a_grace_period_may_save_first(tmp_path: Path, backend: str) -> None:
    write_script(tmp_path, SAVE)
    run = Run(["run", "-n", "2", "--backend", backend, "script.py"], tmp_path)
    with run.started() as process:
        for rank in range(2):
            wait_for(tmp_path / f"up.{rank}", process)
        os.kill(process.pid, signal.SIGTERM)
        _, output = process.communicate(timeout=30)
        assert run.left_running() == []
    assert output == "stopped by SIGTERM; all ranks have ended\n"
    assert sorted(path.name for path in tmp_path.glob("saved.*")) == ["saved.0", "saved.1"]


def _run_sleeper(link: AgentLink, folder: Path, run: Run) -> None:
    """One rank of the agent, up and asleep."""
    write_script(folder, "import pathlib, time\npathlib.Path('up').touch()\ntime.sleep(1000)\n")
    program = Entrypoint(SCRIPT, "script.py", directory=str(folder))
    job = NodeJob(program, link.host, 0, 1, 0, 1, 1, "127.0.0.1", 1, {MARK: run.mark}, local_world=1)
    link.wire.send({"do": "run", "job": job.to_json()})
    deadline = time.monotonic() + 60
    while not (folder / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_agent_that_hears_nothing_of_its_launcher_ends_its_rank(tmp_path: Path) -> None:
    run = Run([], tmp_path)
    links = AgentLinks()
    link = links.start("far", agent_command(), run.variables)
    assert link.process is not None
    assert links.await_event([link], "hello", time.monotonic() + 60)
    try:
        _run_sleeper(link, tmp_path, run)
        link.wire.send({"do": "keepalive", "seconds": 0.5})
        assert link.process.wait(timeout=30) == 1
        assert run.left_running() == []
    finally:
        links.kill()
        links.close()


def test_what_a_killed_agent_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process id may also be that of an agent in another container, where /tmp is shared."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = Run([], tmp_path, {"TMPDIR": str(tmp_path)})
    links = AgentLinks()
    link = links.start("here", agent_command(), run.variables)
    link.is_local = True
    answers = links.await_event([link], "hello", time.monotonic() + 60)
    link.hello = answers[link]
    assert link.process is not None
    others = tmp_path / f"unisono-{link.process.pid}-abcdefgh"
    others.mkdir()
    try:
        _run_sleeper(link, tmp_path, run)
        assert len(list(tmp_path.glob(f"unisono-{link.process.pid}-*"))) == 2
        link.process.kill()
        link.process.wait()
    finally:
        links.kill()
        links.close()
        run.end()
    assert list(tmp_path.glob("unisono-*")) == [others]


def test_the_first_node_keeps_the_store_until_the_others_know_the_end() -> None:
    """Were it gone before, a node that asks whether all have finished would fail a job that went well."""
    program, store = Entrypoint(SCRIPT, "script.py", (), "."), HashStore()
    common: dict[str, Any] = {"program": program, "count": 1, "world": 2, "address": "", "port": 0, "environment": {}}
    first, second = (
        NodeRendezvous(store, NodeJob(host=f"node{node}", node=node, nodes=2, first_rank=node, **common))
        for node in range(2)
    )
    assert not first.finished_everywhere(first_time=True)
    assert second.finished_everywhere(first_time=True)
    waiting = threading.Thread(target=first.exit_barrier)
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive()
    second.exit_barrier()
    waiting.join(timeout=20)
    assert not waiting.is_alive()


UNEVEN = """
import os, pathlib, signal, subprocess, sys, time
import unisono as uni
comm = uni.init()
comm.barrier()
maps = pathlib.Path("/proc/self/maps").read_text().split()
pathlib.Path(f"segments.{comm.rank}").write_text(" ".join({word for word in maps if "mpich_shm" in word}))
if comm.rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.run(["sh", "-c", "setsid sleep 1000 & exit 0"])
pathlib.Path(f"up.{comm.rank}").touch()
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["launcher", pytest.param("rank", marks=pytest.mark.thorough)])
def test_a_killed_mpi_job_leaves_nothing(tmp_path: Path, how: str) -> None:
    """mpiexec kills all agents once one has ended: that of rank 0, long before that of rank 1."""
    pytest.importorskip("mpi4py")
    write_script(tmp_path, UNEVEN)
    with tempfile.TemporaryDirectory() as temporary:  # of a short name, as sockets want
        _kill_mpi_job(tmp_path, temporary, how)
        assert os.listdir(temporary) == []


@pytest.mark.thorough
def test_what_an_mpi_job_leaves_of_which_all_are_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    write_script(tmp_path, UNEVEN)
    write_script(tmp_path, "print('well')", "next.py")
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(["run", "-n", "2", "--backend", "mpi", "script.py"], tmp_path, {"TMPDIR": temporary})
        with run.started() as process:
            for rank in range(2):
                wait_for(tmp_path / f"up.{rank}", process)
            segment = _kill_when_memory_is_noted(tmp_path, temporary, run.running)
        assert any(name.startswith("unisono-mpi-") for name in os.listdir(temporary))
        assert os.path.exists(segment)
        done = Run(["run", "-n", "2", "--backend", "mpi", "next.py"], tmp_path, {"TMPDIR": temporary}).finish()
        assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] well", "[1] well"]), done
        assert os.listdir(temporary) == []
        assert not os.path.exists(segment)


@pytest.mark.thorough
def test_a_launcher_removes_what_its_killed_agents_have_left(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    write_script(tmp_path, UNEVEN)
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(["run", "-n", "2", "--backend", "mpi", "script.py"], tmp_path, {"TMPDIR": temporary})
        with run.started() as process:
            for rank in range(2):
                wait_for(tmp_path / f"up.{rank}", process)
            segment = _kill_when_memory_is_noted(
                tmp_path, temporary, lambda: [pid for pid in run.running() if pid != process.pid]
            )
            process.communicate(timeout=60)
        assert process.returncode == 1
        assert os.listdir(temporary) == []
        assert not os.path.exists(segment)


def _kill_when_memory_is_noted(tmp_path: Path, temporary: str, whom: Callable[[], list[int]]) -> str:
    """The file of the memory that the ranks shared."""
    (segment,) = (tmp_path / "segments.0").read_text().split()
    deadline = time.monotonic() + 60
    while not list(Path(temporary).glob("unisono-*/shared_memory")):  # agents look every few seconds
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found = whom()
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # so that none gets to react
        for pid in found:
            os.kill(pid, signum)
    return segment


def _kill_mpi_job(tmp_path: Path, temporary: str, how: str) -> None:
    run = Run(["run", "-n", "2", "--backend", "mpi", "script.py"], tmp_path, {"TMPDIR": temporary})
    with run.started() as process:
        for rank in range(2):
            wait_for(tmp_path / f"up.{rank}", process)
        segments = (tmp_path / "segments.0").read_text().split()
        assert all(map(os.path.exists, segments))
        assert segments
        (rank_0,) = (each.pid for each in stacks.ranks_here() if each.rank == 0 and each.launcher == process.pid)
        os.kill(process.pid if how == "launcher" else rank_0, signal.SIGKILL)
        assert run.left_running(20) == []
    assert not any(map(os.path.exists, segments))
