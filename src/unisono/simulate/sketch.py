"""A task's model to look at, with as little memory as it takes."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.mesh.deferred_init.deferred_model import defer_init, defer_init_approximately
from unisono.mesh.deferred_init.init_recorder import CannotRecord
from unisono.mesh.deferred_init.seeded_init import build
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.blocks import find_blocks
from unisono.parallel.task import Task

_SMALL = 2 * 10**8  # parameters that a model may have to be built for a look at it
_SMALL_BLOCK = 5 * 10**8  # and a block of one that is not built


def without_memory(task: Task) -> nn.Module:
    """Its shapes and ops; on the meta device, unless its constructor looks at values."""
    try:
        with no_side_effects(task.model), torch.device("meta"):
            return task.model()
    except Exception:
        return build(task.model, 0)


def to_try_out(task: Task, model: nn.Module) -> nn.Module:
    """One whose modules can be run, to see what they share out, unless somebody gave rules; the model itself where
    that would take much memory."""
    if task.rules is not None or why_not_tried(model):
        return model
    try:
        return defer_init_approximately(task.model, 0).model
    except CannotRecord:
        return model if _size(model) > _SMALL else defer_init(task.model, 0).model


def why_not_tried(model: nn.Module) -> str:
    """What is too large of it to have its layers run for a look."""
    with contextlib.suppress(UsageError):
        size = max(_size(block) for block in find_blocks(model).modules)
        if size > _SMALL_BLOCK:
            return f"a block of it has {size:,} parameters"
    return ""


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
