"""The outputs of a model for any number of samples, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from unisono.errors import UsageError
from unisono.parallel.share import rows_between, rows_of
from unisono.parallel.trainer import Trainer
from unisono.train.order import require_whole_number


def predict(trainer: Trainer, inputs: Any, batch_size: int, device: torch.device) -> Any:
    """The model's outputs for all inputs, in their order, on every rank."""
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], tuple):
        raise UsageError(
            "predict was given a list of tuples, as datasets are; expected the inputs of all samples as the model "
            "takes them, as torch.stack([sample[0] for sample in dataset])"
        )
    rows = rows_of(inputs)
    require_whole_number("batch_size", batch_size, 1)
    if not rows:
        raise UsageError("predict was given no sample; expected at least one")
    inputs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, inputs)
    least = trainer.part[1] * trainer.plan.microbatches if trainer.plan.pp > 1 else 1
    batch_size = max(batch_size, least)
    parts = []
    for start in range(0, rows, batch_size):
        part = rows_between(inputs, start, min(start + batch_size, rows))
        parts.append(rows_between(trainer.predict(_with_rows(part, least)), 0, rows_of(part)))
    return _joined(parts)


def _with_rows(inputs: Any, least: int) -> Any:
    """The inputs, with the last sample repeated where a pipeline needs more of them."""
    missing = least - rows_of(inputs)

    def longer(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return leaf
        return torch.cat([leaf, leaf[-1:].expand(missing, *leaf.shape[1:])])

    return inputs if missing <= 0 else tree_map(longer, inputs)


def _joined(parts: Sequence[Any]) -> Any:
    flat = [tree_flatten(part) for part in parts]
    leaves = [
        torch.cat([each[place] for each, _ in flat]) if isinstance(leaf, torch.Tensor) else leaf
        for place, leaf in enumerate(flat[0][0])
    ]
    return tree_unflatten(leaves, flat[0][1])
