"""`unisono attach`: what the ranks of a running job do, whatever they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.harness import Run, wait_for, write_script
from tests.processes import run_forked
from unisono.comm.watchdog import attach
from unisono.errors import UsageError
from unisono.launch.worker import stacks

BUSY = """
import os, pathlib, re, signal, sys, time
import torch
import unisono as uni
from torch.utils.data import DataLoader

class Samples:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        while index == 3:
            pathlib.Path("up.1").touch()
            time.sleep(0.1)  # worker
        return index

def loop():
    while True: pass  # loop

def do():
    if comm.rank == 0:
        comm.all_reduce(x)  # wait
    if comm.rank == 1:
        list(DataLoader(Samples(), num_workers=1))  # loader
    if comm.rank == 2:
        re.fullmatch("(a+)+", "a" * 60 + "b")  # native code that does not let Python run
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    loop()

comm = uni.init()
x = torch.ones(4)
comm.all_reduce(x)
if comm.rank != 1:
    pathlib.Path(f"up.{comm.rank}").touch()
do()
"""


@pytest.fixture(scope="module", params=["gloo", pytest.param("mpi", marks=pytest.mark.thorough)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The launcher's process id, and the folder."""
    if request.param == "mpi":
        pytest.importorskip("mpi4py")
    folder = tmp_path_factory.mktemp("job")
    write_script(folder, BUSY)
    with Run(["run", "-n", "5", "--backend", request.param, "script.py"], folder).started() as process:
        for rank in range(5):
            wait_for(folder / f"up.{rank}", process)
        yield process.pid, folder


def line(mark: str) -> int:
    return next(number for number, text in enumerate(BUSY.splitlines(), 1) if text.endswith(f"# {mark}"))


def looked(pid: int, folder: Path, *options: str) -> str:
    done = Run(["attach", str(pid), *options], folder).finish()
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def test_every_rank_is_shown_whatever_it_does(job: tuple[int, Path]) -> None:
    found = json.loads(looked(*job, "--json"))
    sentences = found["report"].split("; ")
    assert f"rank 0 waits in all_reduce #2 float32[4] at script.py:{line('wait')}" in sentences
    assert f"rank 1 has not entered any collective since #1 and is at script.py:{line('loader')}" in sentences
    assert "rank 2 is busy in native code, or has just left the world" in sentences
    assert "rank 3 has been stopped (by SIGSTOP, or in a debugger)" in sentences
    assert f"rank 4 has not entered any collective since #1 and is at script.py:{line('loop')}" in sentences

    def lines(stack: list[list[Any]]) -> list[int]:
        return [number for file, number, _ in stack if file.endswith("script.py")]

    stacks = {each["rank"]: lines(each["stack"]) for each in found["ranks"]}
    native = line("native code that does not let Python run")
    assert [stacks[rank][-1] for rank in (0, 1, 2, 4)] == [line("wait"), line("loader"), native, line("loop")]
    assert stacks[3] == []
    (worker,) = found["ranks"][1]["forked"]
    assert lines(worker["stack"])[-1] == line("worker")


def test_quiet_is_the_report_alone(job: tuple[int, Path]) -> None:
    text = looked(*job, "--quiet")
    assert text.count("\n") == 1
    assert f"rank 4 has not entered any collective since #1 and is at script.py:{line('loop')}" in text


def test_equal_stacks_are_shown_once(job: tuple[int, Path]) -> None:
    text = looked(*job)
    assert text.count(f"script.py:{line('wait')} do") == 1, text
    assert text.count("<module>") == 1


def test_a_job_has_many_names(job: tuple[int, Path], tmp_path: Path) -> None:
    """Any of its processes, and the run folder that one holds."""
    pid, _ = job
    ranks = attach.find(str(pid))
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3, 4]
    assert attach.find(str(ranks[2].pid)) == ranks
    (tmp_path / "run.lock").write_text(f"process {ranks[0].pid} on host {os.uname().nodename}, since now\n")
    assert attach.find(str(tmp_path)) == ranks


def test_what_is_no_job_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.lock").write_text("process 17 on host far.example, since now\n")
    other = subprocess.Popen(["sleep", "1000"])
    for name, sentence in (
        (str(other.pid), "has no running ranks on this host"),
        ("4194304", "there is no process 4194304"),
        (str(tmp_path / "none"), "neither a process id nor a folder"),
        (str(tmp_path), "no job has this run folder"),
        (str(tmp_path / "elsewhere"), "runs on host far.example"),
    ):
        with pytest.raises(UsageError, match=sentence):
            attach.find(name)
    other.kill()
    other.wait()


def test_pipes_where_files_are_expected_stop_nobody(job: tuple[int, Path], tmp_path: Path) -> None:
    """In a run folder, and among the descriptors of another process of this host."""
    lock = tmp_path / "run.lock"
    for pipe in (lock, tmp_path / "0.stacks"):
        os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", "exec 9<>0.stacks; exec sleep 1000"], cwd=tmp_path) as other:
        late = [threading.Timer(20, other.kill), threading.Timer(20, lambda: os.close(os.open(lock, os.O_RDWR)))]
        for each in late:  # who waits at a pipe goes on
            each.start()
        while not os.path.exists(f"/proc/{other.pid}/fd/9"):
            time.sleep(0.02)
        with pytest.raises(UsageError, match="no job has this run folder"):
            attach.find(str(tmp_path))
        assert [rank.rank for rank in attach.find(str(job[0]))] == [0, 1, 2, 3, 4]
        assert all(each.is_alive() for each in late)
        for each in late:
            each.cancel()
            each.join()
        other.kill()


def _as_nobody(pid: int) -> None:
    os.setresuid(65534, 65534, 65534)
    with pytest.raises(UsageError, match="is another user's"):
        attach.find(str(pid))


@pytest.mark.skipif(os.getuid() != 0, reason="root alone may become another user")
def test_another_user_sees_nothing(job: tuple[int, Path], tmp_path: Path) -> None:
    pid, _ = job
    (end,) = run_forked([lambda: _as_nobody(pid)], tmp_path)
    assert end.code == 0, end


ENDS = """
import os, signal, sys, time
def end(*_):
    os.unlink(sys.argv[1])
signal.signal(int(sys.argv[2]), end)
print("up", flush=True)
time.sleep(1000)
"""


def test_a_job_that_ends_while_it_is_looked_at_has_no_stacks(tmp_path: Path) -> None:
    path = tmp_path / "0.stacks"
    path.touch()
    words = [sys.executable, "-c", ENDS, str(path), str(int(stacks.SIGNAL))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        rank = stacks.RankProcess(process.pid, path, rank=0, world=1, attempt=0, launcher=0, thread=0)
        try:
            assert rank.stack(60.0) == []
            assert not path.exists()
        finally:
            process.kill()
