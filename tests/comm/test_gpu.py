"""CUDA tensors on NCCL, and staged through pinned memory on gloo. One GPU serves: NCCL in a world of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("gpu_program.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 1), ("gloo", 2), ("gloo", 4)])
def test_the_table_on_cuda_tensors(backend: str, ranks: int) -> None:
    root = PROGRAM.parents[2]
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"}
    words = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "--backend", backend, str(PROGRAM)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{backend}: 12 dtypes x 9 reductions" in done.stdout
