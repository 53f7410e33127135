"""Half precision, bfloat16 parameters and float8 on a GPU, which two ranks share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unisono.parallel.float8 import emulated_linear, float8_linear

PROGRAM = Path(__file__).with_name("low_precision_program.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


def test_plans_agree() -> None:
    root = PROGRAM.parents[2]
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"}
    words = [sys.executable, "-m", "unisono", "run", "-n", "2", "--backend", "gloo", str(PROGRAM)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of bf16") == 25, done.stdout


@pytest.mark.parametrize("is_compiled", [False, True])
def test_float8_products(is_compiled: bool) -> None:
    function = torch.compile(float8_linear, fullgraph=True) if is_compiled else float8_linear
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(*shape, device="cuda", generator=generator) for shape in ((3, 37, 128), (256, 128)))
    dy = torch.randn(3, 37, 256, device="cuda", generator=generator)

    def run(product: object, dtype: torch.dtype) -> list[torch.Tensor]:
        given = [each.bfloat16().to(dtype).requires_grad_() for each in (x, weight)]
        y = product(*given)  # type: ignore[operator]
        y.backward(dy.bfloat16().to(y.dtype))
        return [y.detach(), *(each.grad for each in given if each.grad is not None)]

    for mine, emulated in zip(run(function, torch.float32), run(emulated_linear, torch.float64), strict=True):
        assert float((mine.double() - emulated).abs().max() / emulated.abs().max()) < 2.0**-6
