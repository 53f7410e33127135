"""The command: its table, its exit codes, its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from unisono.cli import main
from unisono.errors import UsageError
from unisono.parallel.task import load_task
from unisono.plan.plan import Plan
from unisono.verify.plan_grid import plans_for
from unisono.verify.verify import verify_all

TASKS = Path(__file__).parents[1] / "equivalence" / "tasks.py"


def test_an_equivalent_plan_gives_0_and_how_much_tp_shards(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{TASKS}:mlp", "--plan", "tp=2", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert "equivalent" in shown
    assert "initial parameters" in shown
    assert "tp=2 shards " in shown


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{TASKS}:mlp", "--plan", "tp=2", "--steps", "1", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["equivalent"] is True
    assert {each["kind"] for each in reported["worst"]} >= {"loss", "gradients", "parameters", "optimizer state"}
    assert reported["coverage"].startswith("tp=2 shards ")


def test_a_refused_plan_gives_1_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{TASKS}:conv", "--plan", "dp=2,microbatches=2", "--quiet"]) == 1
    shown = capsys.readouterr().out
    assert "refused" in shown
    assert "BatchNorm" in shown


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ((f"{TASKS}:mlp", "--plan", "dp=2", "-n", "3"), "needs 2 ranks"),
        ((f"{TASKS}:none", "--plan", "dp=2"), "has no 'none'"),
        (("nofile.py:x", "--plan", "dp=2"), "there is no file nofile.py"),
        (("tasks", "--plan", "dp=2"), "expected file.py:name"),
        ((f"{TASKS}:mlp", "--plan", "all"), "needs -n N"),
        ((f"{TASKS}:mlp", "--plan", "dp=2", "-n", "0"), "-n 0: expected at least 1 rank"),
        ((f"{TASKS}:mlp", "--plan", ""), "--plan is empty; give a plan such as dp=2"),
        ((f"{TASKS}:mlp", "--plan", "All", "-n", "2"), '"all", in small letters'),
        ((f"{TASKS}:MLP", "--plan", "dp=2"), "expected a uni.Task"),
    ],
)
def test_bad_input_is_reported_in_a_line(
    words: tuple[str, ...], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words]) == 2
    output = capsys.readouterr().err
    assert reported in output
    assert len(output.strip().splitlines()) == 1


def test_the_command_in_a_process_of_its_own() -> None:
    """Nothing but that line is said, whatever is imported on the way, and what main() gives is the exit code."""
    command = [sys.executable, "-m", "unisono", "verify", f"{TASKS}:none", "--plan", "dp=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_all_plans_that_fit() -> None:
    plans = list(plans_for(4))
    assert all(plan.world == 4 for plan in plans)
    assert {Plan(dp=4), Plan(tp=4), Plan(dp=2, tp=2), Plan(dp=2, tp=2, zero=3)} <= set(plans)
    assert len(plans) == len(set(plans))
    assert not any(plan.ep > 1 for plan in plans)
    with_experts = plans_for(4, experts=True)
    assert {Plan(dp=4, ep=4), Plan(dp=4, ep=2), Plan(dp=2, ep=2, tp=2)} <= set(with_experts)


def test_a_task_is_found_by_its_address() -> None:
    assert load_task(f"{TASKS}:mlp").name == "mlp"
    with pytest.raises(UsageError, match="expected file"):
        load_task("tasks")


def test_the_matrix_of_all_plans(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["verify", f"{TASKS}:conv", "--plan", "all", "-n", "2", "--steps", "1"])
    shown = capsys.readouterr().out
    assert code == 0, shown
    rows = {line.split()[0]: line for line in shown.splitlines() if line and not line.startswith(" ")}
    assert rows["dp=2"].split()[-1] == "equivalent"
    assert rows["tp=2"].split()[-1] == "equivalent"  # its layers are sharded by search
    assert rows["cp=2"].split()[-1] == "refused"
    assert "plans equivalent" in shown.splitlines()[-1]
    assert "refused: " in shown


def _on_one_rank_only() -> nn.Module:
    if os.environ.get("RANK") == "1":
        raise UsageError("this rank does not like it")
    return nn.Linear(12, 5)


def test_a_refusal_by_one_rank_ends_that_plan_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits meanwhile: both are ended, and new ones try what is left."""
    monkeypatch.setattr("unisono.verify.verify._TOGETHER", 0.5)
    task = replace(load_task(f"{TASKS}:mlp"), model=_on_one_rank_only, rules=None)
    reported: list[str] = []
    verdicts = verify_all(
        task, [Plan(dp=2), Plan(dp=2, zero=1)], steps=1, on_verdict=lambda each: reported.append(each.plan)
    )
    assert [each.refusal for each in verdicts] == ["this rank does not like it"] * 2
    assert reported == ["dp=2", "dp=2,zero=1"]
