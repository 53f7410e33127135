"""The command: its table, its exit codes, its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.plan.plan import Plan
from unisono.train.shapes import plans_for
from unisono.train.task import load_task

TASKS = Path(__file__).parents[1] / "equivalence" / "tasks.py"


def verify(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "verify", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_an_equivalent_plan_exits_0() -> None:
    done = verify(f"{TASKS}:mlp", "--plan", "dp=2", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equivalent" in done.stdout
    assert "initial parameters" in done.stdout


def test_json() -> None:
    done = verify(f"{TASKS}:mlp", "--plan", "tp=2", "--steps", "1", "--json")
    told = json.loads(done.stdout)
    assert told["equivalent"] is True
    assert {each["kind"] for each in told["worst"]} >= {"loss", "gradients", "parameters", "optimizer state"}


def test_a_refused_plan_exits_1_and_says_why() -> None:
    done = verify(f"{TASKS}:conv", "--plan", "dp=2,microbatches=2")
    assert done.returncode == 1
    assert "refused" in done.stdout
    assert "BatchNorm" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((f"{TASKS}:mlp", "--plan", "dp=2", "-n", "3"), "needs 2 ranks"),
        ((f"{TASKS}:none", "--plan", "dp=2"), "has no 'none'"),
        (("nofile.py:x", "--plan", "dp=2"), "there is no file nofile.py"),
        (("tasks", "--plan", "dp=2"), "expected file.py:name"),
        ((f"{TASKS}:mlp", "--plan", "all"), "needs -n N"),
        ((f"{TASKS}:MLP", "--plan", "dp=2"), "expected a uni.Task"),
    ],
)
def test_bad_input_is_told_in_a_line(words: tuple[str, ...], told: str) -> None:
    done = verify(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_all_plans_that_fit() -> None:
    plans = list(plans_for(4))
    assert all(plan.world == 4 for plan in plans)
    assert {Plan(dp=4), Plan(tp=4), Plan(dp=2, tp=2), Plan(dp=2, tp=2, zero=3)} <= set(plans)
    assert len(plans) == len(set(plans))


def test_a_task_is_found_by_its_address() -> None:
    assert load_task(f"{TASKS}:mlp").name == "mlp"
    with pytest.raises(UsageError, match="expected file"):
        load_task("tasks.py")
