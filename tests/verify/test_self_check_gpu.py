"""The self-check on a GPU: sound plans are proved in every precision, and steps after it are those of a run without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def _adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)  # type: ignore[arg-type]


def _train(plan: str, precision: str, folder: str) -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x[:, :8].argmax(1))
    lines = []
    for check in ("off", "auto"):
        engine = uni.Engine(
            _model, F.cross_entropy, _adam, plan=plan, precision=precision, device="cuda:0", check=check
        )
        history = engine.fit(data, epochs=1, batch_size=32, progress=False)
        lines.append(" ".join(loss.hex() for loss in history.losses))
        lines.append(engine.ready.proof)
    if engine.comm.rank == 0:
        (Path(folder) / "told").write_text("\n".join(lines))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", ["microbatches=2", "dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_a_sound_plan_is_proved(tmp_path: Path, plan: str, precision: str) -> None:
    uni.spawn(_train, uni.Plan.parse(plan).world, "gloo", (plan, precision, str(tmp_path)))
    without, nothing, with_check, proof = (tmp_path / "told").read_text().split("\n")
    assert nothing == ""
    assert proof.startswith(f"plan {plan} proved on your model: worst gradient"), proof
    assert with_check == without
