"""The outputs of a model for any number of samples, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from unisono.errors import UsageError
from unisono.mesh.random import SampleDim
from unisono.parallel.share import BatchDim, dims_of, inputs_dim, rows_between, rows_of, samples_between
from unisono.parallel.trainer import Trainer
from unisono.train.order import require_whole_number


def predict(trainer: Trainer, inputs: Any, batch_size: int, device: torch.device) -> Any:
    """The model's outputs for all inputs, in their order, on every rank."""
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], tuple):
        raise UsageError(
            "predict was given a list of tuples, as datasets are; expected the inputs of all samples as the model "
            "takes them, as torch.stack([sample[0] for sample in dataset])"
        )
    dim = inputs_dim(trainer.batch_dim)
    rows = rows_of(inputs, dim)
    require_whole_number("batch_size", batch_size, 1)
    if not rows:
        raise UsageError("predict was given no sample; expected at least one")
    inputs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, inputs)
    least = trainer.part[1] * trainer.plan.microbatches if trainer.plan.pp > 1 else 1
    batch_size = max(batch_size, least)
    parts = []
    for start in range(0, rows, batch_size):
        part = rows_between(inputs, start, min(start + batch_size, rows), dim)
        held = rows_of(part, dim)
        outputs = trainer.predict(_with_rows(part, least, dim))
        places = trainer.prediction_places(outputs, max(held, least))
        parts.append(_first_samples(outputs, places, max(held, least), held))
    return _joined(parts, places)


def _with_rows(inputs: Any, least: int, dim: BatchDim) -> Any:
    """The inputs, with the last sample repeated where a pipeline needs more of them."""
    missing = least - rows_of(inputs, dim)
    if missing <= 0:
        return inputs
    leaves, spec = tree_flatten(inputs)

    def longer(leaf: torch.Tensor, along: int) -> torch.Tensor:
        last = leaf.narrow(along, leaf.shape[along] - 1, 1)
        return torch.cat([leaf, *[last] * missing], along)

    dims = dims_of(inputs, dim)
    return tree_unflatten(
        [leaf if along is None else longer(leaf, along) for leaf, along in zip(leaves, dims, strict=True)], spec
    )


def _first_samples(outputs: Any, places: Sequence[SampleDim | None], rows: int, held: int) -> Any:
    leaves, spec = tree_flatten(outputs)
    pairs = zip(leaves, places, strict=True)
    return tree_unflatten([samples_between(leaf, where, rows, 0, held) for leaf, where in pairs], spec)


def _joined(parts: Sequence[Any], places: Sequence[SampleDim | None]) -> Any:
    """The outputs of all parts; of those without samples, the first."""
    flat = [tree_flatten(part) for part in parts]
    leaves = [
        leaf if where is None or where.dim is None else torch.cat([each[place] for each, _ in flat], where.dim)
        for place, (leaf, where) in enumerate(zip(flat[0][0], places, strict=True))
    ]
    return tree_unflatten(leaves, flat[0][1])
