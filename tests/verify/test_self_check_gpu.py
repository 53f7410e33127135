"""The self-check on a GPU: sound plans are proved in every precision, and steps after it are those of a run without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unisono as uni

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


PROGRAM = """
import sys

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

plan, precision = sys.argv[1:]
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x[:, :8].argmax(1))


def model():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


for check in ("off", "auto"):
    engine = uni.Engine(
        model, F.cross_entropy, torch.optim.AdamW, plan=plan, precision=precision, device="cuda:0", check=check
    )
    losses = engine.fit(data, epochs=1, batch_size=32, progress=False).losses
    if engine.comm.rank == 0:
        print("losses", *(loss.hex() for loss in losses))
        print("proof", engine.ready.proof)
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", ["microbatches=2", "dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_a_sound_plan_is_proved(tmp_path: Path, plan: str, precision: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "unisono", "run", "-n", str(uni.Plan.parse(plan).world), "--backend", "gloo"]
    ran = subprocess.run([*command, str(tmp_path / "program.py"), plan, precision], capture_output=True, text=True)
    lines = [line.partition("] ")[2] for line in ran.stdout.splitlines()]
    losses = [line for line in lines if line.startswith("losses ")]
    proofs = [line for line in lines if line.startswith("proof")]
    assert len(losses) == 2, ran.stdout + ran.stderr
    assert losses[0] == losses[1]
    assert proofs[0].strip() == "proof"
    assert proofs[1].startswith(f"proof plan {plan} proved on your model: worst gradient"), proofs[1]
