"""BatchNorm that is run on a part of the batch at a time, as "ghost" batch norms are.

Under data parallelism every BatchNorm takes the statistics of the global batch (data/batchnorm.py): right where the
model gives it all samples. Of one that is given some of them, or rows that are no samples, the ranks' parts are not the
parts of what one device normalises. The full batch is run on the "meta" device to see the shapes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.errors import UsageError
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.data.batchnorm import has_batchnorm
from unisono.parallel.inputs import call
from unisono.parallel.meta.meta_tensors import meta_copy, to_meta
from unisono.parallel.meta.shapes import KnownShapes
from unisono.parallel.share import BatchDim, first_batch_size
from unisono.plan.plan import Plan


def require_full_batch_norms(model: nn.Module, plan: Plan, example: tuple[Any, Any], batch_dim: BatchDim = 0) -> None:
    """UsageError where a BatchNorm sees some of a batch's samples only; nothing where that takes values to find out."""
    if plan.dp == 1 or batch_dim != 0 or not has_batchnorm(model):
        return
    samples = first_batch_size(example, batch_dim)
    for name, rows in _rows_seen(model, example[0]):
        if rows % samples:
            raise UsageError(
                f"{name} (BatchNorm) is run on {rows} rows of a batch of {samples} samples at a time, but under plan "
                f"{plan} it takes the statistics of the batch of all ranks; run it on all samples at once, use a norm "
                "without batch statistics, or dp=1"
            )


def _rows_seen(model: nn.Module, inputs: Any) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []

    def note(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor):
            seen.append((name, args[0].shape[0]))

    try:
        with no_side_effects(model), torch.no_grad(), torch.device("meta"), KnownShapes():
            copy = meta_copy(model)
            for name, module in copy.named_modules():
                if isinstance(module, _BatchNorm):
                    module.register_forward_pre_hook(partial(note, name))
            call(copy, to_meta(inputs))
    except Exception:  # it takes values
        return []
    return seen
