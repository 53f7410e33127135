"""Jobs of a real Slurm with two nodes (slurm.py): srun, sbatch with the template that we ship, requeue, preemption."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import slurm
from tests.launch.harness import Run, write_script
from tests.launch.slurm import ROOT, Slurm
from tools.blocks import blocks_of

pytestmark = [pytest.mark.hosts, pytest.mark.thorough]
TEMPLATE = ROOT / "examples" / "slurm" / "train.sbatch"
SCRIPT = ROOT / "examples" / "slurm" / "train.py"
STEPS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = slurm.why_not()
    if reason is not None:
        pytest.skip(f"no Slurm on this machine: {reason}")
    starting = slurm.cluster(tmp_path_factory.mktemp("slurm"))
    try:
        started = starting.__enter__()
    except RuntimeError as error:
        pytest.skip(f"no Slurm on this machine: {error}")
    try:
        yield started
    finally:
        starting.__exit__(None, None, None)


HELLO = """
import os
import torch
import unisono as uni
comm = uni.init()
names = ("SLURMD_NODENAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print(comm.rank, comm.size, int(comm.all_reduce(torch.ones(1))), *(os.environ.get(name) for name in names))
"""


def _on_page() -> list[str]:
    block = next(b for b in blocks_of(ROOT / "docs" / "slurm.md") if "test_slurm.py" in b.notes.get("not run", ""))
    return [line.partition("#")[0].strip() for line in block.text.splitlines()]


def test_the_pages_commands(cluster: Slurm, tmp_path: Path) -> None:
    write_script(tmp_path, HELLO, "train.py")
    commands = _on_page()
    outputs = []
    for command in commands:
        done = cluster.run(*command.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        outputs.append(sorted(line.partition("] ")[2] or line for line in done.stdout.splitlines()))
    on_nodes = [("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)]
    ranks = [f"{rank} 4 4 {node} {local} 2" for rank, (node, local) in enumerate(on_nodes)]
    assert outputs[0] == [f"{rank} 4 4 {node} None None" for rank, (node, _) in enumerate(on_nodes)]
    assert outputs[1] == outputs[2] == ranks


def test_bad_input_is_one_sentence(cluster: Slurm, tmp_path: Path) -> None:
    write_script(tmp_path, "raise SystemExit('started')", "train.py")
    done = cluster.run("srun", "-N2", "-n2", "unisono", "run", "-n", "2", "train.py", cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if line.startswith("unisono: ")]
    assert done.returncode == 2
    assert len(said) == 2
    assert said[0].startswith("unisono: srun has started 2 launchers, and with -n each would run a job of its own")


FAILS = """
import unisono as uni
comm = uni.init()
if comm.rank == 1:
    raise ValueError("broken")
comm.barrier()
"""


def test_a_failure_ends_all_nodes(cluster: Slurm, tmp_path: Path) -> None:
    write_script(tmp_path, FAILS, "train.py")
    done = cluster.run("srun", "-N2", "-n2", "unisono", "run", "train.py", cwd=tmp_path)
    assert done.returncode != 0
    assert "rank 1 failed on host n2 (exit code 1):\nTraceback" in done.stderr
    assert "ValueError: broken" in done.stderr


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


def _submit(cluster: Slurm, folder: Path) -> str:
    """The template as it is, on two nodes with one GPU each, of which there are none."""
    words = ["sbatch", "--parsable", "--gpus-per-node=1", "--output=out", str(TEMPLATE)]
    done = cluster.run(*words, str(SCRIPT), "--save", "run", "--steps", str(STEPS), cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _await_step(folder: Path, step: int, patience: float = 180) -> None:
    deadline = time.monotonic() + patience
    file = folder / "run" / "steps.jsonl"
    while not file.exists() or len(file.read_bytes().splitlines()) < step:
        out = folder / "out"
        assert time.monotonic() < deadline, out.read_text() if out.exists() else "the job has not started"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = Run(["run", "-n", "2", str(SCRIPT), "--save", "run", "--steps", str(STEPS)], folder).finish(240)
    assert done.returncode == 0, done.stderr
    return _losses(folder / "run")


@pytest.mark.parametrize("how", ["requeue", "signal", "kill"])
def test_a_disturbed_job_reaches_the_losses_of_an_undisturbed_one(
    cluster: Slurm, tmp_path: Path, undisturbed: list[float], how: str
) -> None:
    """requeue: as preemption does it. signal: SIGTERM of --signal, before the end of the time; the template requeues
    itself. kill: the node fails, so nothing is saved; Slurm requeues."""
    job = _submit(cluster, tmp_path)
    _await_step(tmp_path, 130)
    if how == "requeue":
        cluster.do("scontrol", "requeue", job)
    elif how == "signal":
        cluster.do("scancel", "--signal=TERM", job)
    else:
        cluster.do("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    cluster.await_field(job, "Restarts", "1")
    cluster.await_field(job, "JobState", "PENDING")
    if how == "kill":
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME", cwd=tmp_path)  # unless its slurmd did that
    cluster.await_idle()
    time.sleep(2)  # slurmd takes credentials of the second in which it revoked the first start's for revoked
    cluster.do("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm itself waits two minutes
    cluster.await_end(job)
    output = (tmp_path / "out").read_text()
    assert cluster.field(job, "JobState") == "COMPLETED", output
    assert _losses(tmp_path / "run") == undisturbed
    assert f"step {STEPS}: done" in output
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert len(starts) == 2
    if how == "kill":
        assert starts[1]["first_step"] >= 100  # of the last checkpoint
    else:
        assert starts[1]["first_step"] >= 130  # saved when it was asked to stop
        assert f"[0] step {starts[1]['first_step']}: asked to stop (SIGTERM)" in output
        assert "Traceback" not in output
