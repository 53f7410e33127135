"""Tasks whose batches 2, 4 and 8 ranks can share, of the models that every plan is proved on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.equivalence import tasks
from unisono.train.task import Task

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from quickstart import quickstart

ROWS = 8


def even(task: Task) -> Task:
    def batch(seed: int) -> Any:
        return tree_map(lambda leaf: leaf[:ROWS] if isinstance(leaf, torch.Tensor) else leaf, task.batch(seed))

    return replace(task, batch=batch)


TASKS = {
    "quickstart": quickstart,
    "mlp": even(tasks.mlp),
    "gpt": even(tasks.gpt),
    "conv": even(tasks.conv),
    "llama": even(tasks.llama),
}
