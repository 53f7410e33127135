"""A task's model to look at, with as little memory as it takes."""

from __future__ import annotations

import torch
from torch import nn

from unisono.mesh.draft import drafted
from unisono.mesh.initial import build
from unisono.train.task import Task

_SMALL = 2 * 10**8  # parameters that a model may have to be built for a look at it


def without_memory(task: Task) -> nn.Module:
    """Its shapes and ops; on the meta device, unless its constructor looks at values."""
    try:
        with torch.device("meta"):
            return task.model()
    except Exception:
        return build(task.model, 0)


def to_try_out(task: Task, model: nn.Module) -> nn.Module:
    """One whose modules can be run, to see what they share out, where that takes little memory and nobody gave rules;
    else the model itself."""
    if task.rules is None and sum(p.numel() for p in model.parameters()) <= _SMALL:
        return drafted(task.model, 0).model
    return model
