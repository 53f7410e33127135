"""Training scripts as they are: what verify, plan and explain find in them, and a plan from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.launch.harness import Run
from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.parallel.task import load_task

SCRIPT = """
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uni

x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x[:, :4].sum(1) > 0).long())
comm = uni.init()
engine = uni.Engine(
    lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)),
    loss=F.cross_entropy,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    plan="dp=2",
    clip=1.0,
    check="off",
)
if __name__ == "__main__":
    try:
        TRAIN
    except Exception:
        print("a script may catch what it likes")
    print(f"plan {engine.plan}", file=sys.stderr)
"""
FIT = "engine.fit(data, batch_size=16, progress=False)"


def _script(folder: Path, train: str = FIT) -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("TRAIN", train))
    return str(path)


@pytest.mark.parametrize(
    "train", [FIT, "engine.fit(DataLoader(data, batch_size=16))", "engine.run((x[:16], data.tensors[1][:16]))"]
)
def test_what_a_script_trains_is_a_task(tmp_path: Path, train: str) -> None:
    before = list(sys.path), list(sys.argv)
    task = load_task(_script(tmp_path, train))
    assert (list(sys.path), list(sys.argv)) == before
    assert not world.is_initialized()
    assert (task.name, task.clip) == ("train", 1.0)
    inputs, targets = task.batch(0)
    assert inputs.shape == (16, 8)
    outputs = task.model().eval()(inputs)
    assert torch.isfinite(task.loss(outputs, targets))
    first = sorted(map(tuple, task.batch(0)[0].tolist()))
    assert (sorted(map(tuple, task.batch(1)[0].tolist())) == first) == ("run" in train)


@pytest.mark.thorough
def test_a_script_is_verified_and_its_plan_overridden(tmp_path: Path) -> None:
    script = _script(tmp_path)
    verified = Run(["verify", script, "--plan", "tp=2", "--json"], tmp_path).finish()
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["equivalent"]
    ran = Run(["run", "-n", "2", "--plan", "tp=2", script], tmp_path).finish()
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines().count("[1] plan tp=2") == 1
    refused = Run(["run", "-n", "2", "--plan", "tp=3", script], tmp_path).finish()
    assert refused.returncode == 2
    assert refused.stderr == "unisono: plan tp=3 needs 3 ranks (tp=3), but 2 are running; start 3\n"


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ("pass", "ended without Engine.fit, Engine.run or Engine.prepare"),
        ("sys.exit(3)", "ended before it began to train: SystemExit: 3"),
    ],
)
def test_a_script_that_does_not_train_is_refused(tmp_path: Path, train: str, reason: str) -> None:
    script = _script(tmp_path, train)
    path = Path(script)
    path.write_text(path.read_text().replace("{engine.plan}", ""))
    with pytest.raises(UsageError, match=reason):
        load_task(script)
    assert not world.is_initialized()


def test_other_addresses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*none\.py"):
        load_task(str(tmp_path / "none.py"))
    with pytest.raises(UsageError, match=r"expected file\.py:name, such as gpt\.py:tiny, or a training script"):
        load_task("train")
    verified = Run(["verify", _script(tmp_path), "--plan", "tp=2", "--backend", "mpi"], tmp_path).finish()
    assert "ranks of MPI cannot be handed what a script trains; use gloo" in verified.stderr
