"""A static pipeline whose stages make tensors, on a GPU, which two ranks share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("static_program.py")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
def test_tensors_made_in_a_stage_are_on_its_gpu() -> None:
    root = PROGRAM.parents[2]
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"}
    words = [sys.executable, "-m", "unisono", "run", "-n", "2", "--backend", "gloo", str(PROGRAM)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("parameters on {'cuda'}") == 2, done.stdout
    assert done.stdout.count("as one cuda device") == 2, done.stdout
