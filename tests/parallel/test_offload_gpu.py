"""Optimizer state in host memory while the model is on a GPU. One GPU serves two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("offload_program.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("nccl", 1)])
def test_offload(backend: str, ranks: int) -> None:
    root = PROGRAM.parents[2]
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"}
    words = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "--backend", backend, str(PROGRAM)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bytes on the GPU") == 5, done.stdout
