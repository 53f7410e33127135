"""Tasks whose batches 2, 4 and 8 ranks can share, of the models that every plan is proved on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from tests.equivalence import tasks
from unisono.parallel.task import Task

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, Config
from quickstart import quickstart

ROWS = 8


def even(task: Task) -> Task:
    def batch(seed: int) -> Any:
        return tree_map(lambda leaf: leaf[:ROWS] if isinstance(leaf, torch.Tensor) else leaf, task.batch(seed))

    return replace(task, batch=batch)


def _gpt() -> nn.Module:
    return GPT(Config(vocabulary=32, context=16, width=16, heads=4, layers=1, dropout=0.1))


def _mlp() -> nn.Module:
    """Of two blocks: what flows between them is all that more of them would show."""
    model = tasks.MLP()
    model.blocks = model.blocks[:2]
    return model


class Encoder(nn.Module):
    """Of torch's own layer, which packs queries, keys and values, and joins samples and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).mean(1))


def _sequences(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 6, 16, generator=generator), torch.randint(3, (ROWS,), generator=generator)


TASKS = {
    "quickstart": quickstart,
    "mlp": replace(even(tasks.mlp), model=_mlp),
    "gpt": replace(even(tasks.gpt), model=_gpt),
    "unpacked": replace(even(tasks.gpt), model=_gpt),  # fused projections are taken apart when it is traced
    "conv": even(tasks.conv),
    "encoder": Task(Encoder, F.cross_entropy, lambda p: torch.optim.AdamW(p, lr=1e-2), _sequences),
    "llama": even(tasks.llama),
}
