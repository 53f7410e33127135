"""Checkpoints in memory: what they survive, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono as uni
from tests.faults import program
from tests.faults.test_elastic import on_two_hosts, two_hosts  # noqa: F401  # a fixture
from tests.faults.test_kills import PROGRAM, wait_for_step
from tests.launch.harness import Run
from tests.launch.namespaces import Hosts
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.launch import environment
from unisono.train.checkpoint import in_memory

STEPS = 18


def in_use() -> set[Path]:
    return set(Path(environment.memory_folder("")).parent.glob(f"{environment.memory_prefix()}*"))


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.thorough)])
def test_a_killed_job_goes_on_from_memory(backend: str, tmp_path: Path, pools: Callable[[str, int], RankPool]) -> None:
    undisturbed, _ = pools("gloo", 2).run(program.trained, str(tmp_path / "undisturbed"), "dp=2,zero=1", "none")[0]
    folder, before = tmp_path / "run", in_use()
    words = ["run", "-n", "2", "--backend", backend, "--max-restarts", "2", PROGRAM, str(folder), "dp=2,zero=1"]
    done = Run([*words, "forward:4,collective:9", str(STEPS), "1"], tmp_path).finish(120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {STEPS} done: {undisturbed}" in done.stdout
    starts = json.loads((folder / "run.json").read_text())["starts"]
    for start, killed_at in zip(starts[1:], (4, 9), strict=True):
        assert start["first_step"] in (killed_at - 2, killed_at - 1), "the step before, if it was published"
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    assert in_use() <= before


@pytest.mark.thorough
@pytest.mark.hosts
def test_the_next_host_has_a_copy(
    two_hosts: Hosts,  # noqa: F811
    tmp_path: Path,
    pools: Callable[[str, int], RankPool],
) -> None:
    folder, plan, before = tmp_path / "run", "dp={ranks},zero=1", in_use()
    options = ("--elastic", "--max-restarts", "1", "-H", "node0:2,node1:2")
    run = on_two_hosts(two_hosts, tmp_path, *options, PROGRAM, str(folder), plan, "stay:7", str(STEPS), "2")
    with run.started() as process:
        wait_for_step(folder, 7, 4)
        two_hosts.kill_second()
        (memory,) = in_use() - before
        assert (memory / "node0").exists()
        shutil.rmtree(memory / "node1")
        out, output = process.communicate(timeout=240)
        assert run.left_running() == []
    assert process.returncode == 0, out + output
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [(start["world"], start["first_step"]) for start in starts] == [(4, 0), (2, 6)]
    parts = ((4, 6), (2, STEPS))
    again = [pools("gloo", n).run(program.trained, str(tmp_path / "again"), plan, "none", end)[0] for n, end in parts]
    assert f"step {STEPS} done: {again[-1][0]}" in out
    assert in_use() <= before


def test_memory_that_no_process_holds_is_removed(tmp_path: Path) -> None:
    held, left = (tmp_path / f"{environment.memory_prefix()}{name}" for name in ("held", "left"))
    locks = [in_memory.hold(each) for each in (held, left)]
    os.close(locks[1])
    in_memory.remove_abandoned(tmp_path / "own")
    assert left.exists(), "its job may be about to restart"
    for each in (held, left):
        os.utime(each / "held", (0, 0))
    in_memory.remove_abandoned(tmp_path / "own")
    assert held.exists()
    assert not left.exists()
    os.close(locks[0])


def test_a_link_in_memory_changes_no_other_file(tmp_path: Path) -> None:
    own, other = tmp_path / f"{environment.memory_prefix()}own", tmp_path / "other"
    own.mkdir()
    other.touch()
    os.utime(other, (0, 0))
    (own / "held").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        in_memory.hold(own)
    in_memory.remove_abandoned(tmp_path / "another")
    assert other.stat().st_mtime == 0
    assert own.exists()


def test_without_a_launcher_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.MEMORY, raising=False)
    engine = uni.Engine(nn.Linear(12, 2), nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(UsageError, match=re.escape("start with `unisono run --max-restarts K`")):
        engine.fit(program.data(), batch_size=8, save="memory", save_every=1)
    with pytest.raises(UsageError, match="needs save_every=STEPS"):
        engine.fit(program.data(), batch_size=8, save="memory")
