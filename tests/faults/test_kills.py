"""Jobs that are killed, for real, and what is left of them: all of it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import program
from tests.launch.harness import Run
from tests.ranks import RankPool

PROGRAM = str(Path(__file__).with_name("program.py"))


def finished(folder: Path, plan: str, faults: str, ranks: int, *options: str, steps: int = 18) -> tuple[str, str]:
    """What the job printed at last: the digest, and all of it."""
    words = ["run", "-n", str(ranks), *options, PROGRAM, str(folder), plan, faults, str(steps)]
    done = Run(words, folder.parent).finish(120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"step (\d+) done: (\w+)", done.stdout)
    assert found, done.stdout
    assert int(found[1]) == steps
    return found[2], done.stdout + done.stderr


def test_kills_in_forward_in_a_collective_and_while_saving_lose_nothing(
    tmp_path: Path, pools: Callable[[str, int], RankPool]
) -> None:
    undisturbed, _ = pools("gloo", 2).run(program.trained, str(tmp_path / "undisturbed"), "dp=2,zero=1", "none")[0]
    faults = "forward:3,collective:9,saving:15"
    digest, output = finished(tmp_path / "run", "dp=2,zero=1", faults, 2, "--max-restarts", "3")
    assert digest == undisturbed
    assert re.findall(r"restart (\d) of 3: rank 1 was killed by SIGKILL", output) == ["1", "2", "3"]
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    firsts = [start["first_step"] for start in starts]
    assert firsts[:2] == [0, 0]
    for first, killed_at in zip(firsts[2:], (9, 15), strict=True):
        last = killed_at - killed_at % 5
        assert first in (last - 5, last), "the checkpoint that was being written is whole, or it is not there"
    ids = [json.loads(line)["step"] for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert ids == list(range(1, 19))


@pytest.mark.thorough
def test_sigterm_saves_first_and_fewer_ranks_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Run(["run", "-n", "2", PROGRAM, str(folder), "auto", "none", "100000"], tmp_path)
    with run.started() as process:
        step = wait_for_step(folder, 7, 2)
        os.kill(process.pid, signal.SIGTERM)
        out, output = process.communicate(timeout=120)
        assert run.left_running() == []
    assert "stopped by SIGTERM" in output
    saved = max(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))
    assert saved >= step
    assert f"step {saved} asked to stop (SIGTERM)" in out
    steps = saved + 3
    _, output = finished(folder, "auto", "none", 1, steps=steps)
    assert f"from step {saved}: plan " in output, output


def wait_for_step(folder: Path, step: int, ranks: int) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        files = [folder / f"at.{rank}" for rank in range(ranks)]
        if all(file.exists() for file in files):
            reached = min(int(file.read_text().split()[1]) for file in files)
            if reached >= step:
                return reached
        time.sleep(0.02)
    raise AssertionError(f"no rank came to step {step}")
