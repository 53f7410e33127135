"""evaluate(): loss and metrics over a dataset; predict(): outputs for any number of samples. Both under any plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from unisono.errors import UsageError
from unisono.mesh.random.state import SampleDim
from unisono.parallel.share import (
    BatchDim,
    Share,
    batch_size_of,
    batch_slice,
    dims_of,
    inputs_dim,
    samples_between,
)
from unisono.parallel.trainer import Trainer
from unisono.train.data.sampler import require_whole_number
from unisono.train.metric_sums import MetricSums
from unisono.train.metrics import Function, Metric, number_of


def evaluate(trainer: Trainer, batches: Iterable[Any], metrics: dict[str, Metric | Function]) -> dict[str, float]:
    """The mean loss over the samples of all batches, and each metric; the same on every rank.

    `batches`: global batches, or this rank's part of each; metrics that are functions need global ones
    (see `needs_global_batches`).
    """
    summed = {name: metric for name, metric in metrics.items() if isinstance(metric, Metric)}
    functions = {name: metric for name, metric in metrics.items() if not isinstance(metric, Metric)}
    sums: dict[str, torch.Tensor] = {}
    totals = dict.fromkeys(("loss", *functions), 0.0)
    samples = 0
    for batch in batches:
        loss, parts = _sums_of(trainer, batch, summed)
        for name, part in parts.items():
            sums[name] = sums[name] + part if name in sums else part
        size = trainer.last_batch_size
        totals["loss"] += size * float(loss)
        if functions:
            inputs, targets = _global_batch(batch, next(iter(functions)))
            outputs = trainer.predict(inputs)
            for name, function in functions.items():
                totals[name] += size * number_of(name, function(outputs, targets))
        samples += size
    trainer.loss.settle()
    if not samples:
        raise UsageError("the dataset to evaluate is empty; expected at least one sample")
    means = {name: total / samples for name, total in totals.items()}
    return means | {name: number_of(name, summed[name].value(each)) for name, each in sums.items()}


def needs_global_batches(metrics: dict[str, Metric | Function]) -> bool:
    """Whether these metrics need global batches on every rank."""
    return any(not isinstance(metric, Metric) for metric in metrics.values())


def _global_batch(batch: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(batch, Share):
        return batch[0], batch[1]
    if len(batch.positions) < batch.of:
        raise UsageError(
            f"metric {name!r} is a function, which needs global batches, but the loader gives each rank its part: "
            "make it with Loader(..., global_batches=True), or give the dataset itself"
        )
    inputs, targets = batch.batch
    return inputs, targets


def _sums_of(trainer: Trainer, batch: Any, metrics: dict[str, Metric]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one batch, and the sums of each metric over it."""
    if not metrics:
        return trainer.evaluate(batch), {}
    sums = MetricSums(trainer, metrics)
    loss = trainer.evaluate(batch, sums.observe)
    return loss, sums.total()


def predict(trainer: Trainer, inputs: Any, batch_size: int, device: torch.device) -> Any:
    """The model's outputs for all inputs, in their order, on every rank."""
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], tuple):
        raise UsageError(
            "predict was given a list of tuples, like a dataset; expected the inputs of all samples, as for the "
            "model, e.g. torch.stack([sample[0] for sample in dataset])"
        )
    dim = inputs_dim(trainer.batch_dim)
    size = batch_size_of(inputs, dim)
    require_whole_number("batch_size", batch_size, 1)
    if not size:
        raise UsageError("predict was given no sample; expected at least one")
    inputs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, inputs)
    least = trainer.part[1] * trainer.plan.microbatches if trainer.plan.pp > 1 else 1
    batch_size = max(batch_size, least)
    parts = []
    for start in range(0, size, batch_size):
        part = batch_slice(inputs, start, min(start + batch_size, size), dim)
        held = batch_size_of(part, dim)
        outputs = trainer.predict(_padded(part, least, dim))
        dims = trainer.prediction_dims_of(outputs, max(held, least))
        parts.append(_first_samples(outputs, dims, max(held, least), held))
    return _joined(parts, dims)


def _padded(inputs: Any, least: int, dim: BatchDim) -> Any:
    """The inputs, padded with the last sample if a pipeline needs more of them."""
    missing = least - batch_size_of(inputs, dim)
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


def _first_samples(outputs: Any, dims: Sequence[SampleDim | None], size: int, held: int) -> Any:
    leaves, spec = tree_flatten(outputs)
    pairs = zip(leaves, dims, strict=True)
    return tree_unflatten([samples_between(leaf, dim, size, 0, held) for leaf, dim in pairs], spec)


def _joined(parts: Sequence[Any], dims: Sequence[SampleDim | None]) -> Any:
    """The outputs of all parts, concatenated; of outputs without a sample dim, the first."""
    flat = [tree_flatten(part) for part in parts]
    leaves = [
        leaf if dim is None or dim.dim is None else torch.cat([each[index] for each, _ in flat], dim.dim)
        for index, (leaf, dim) in enumerate(zip(flat[0][0], dims, strict=True))
    ]
    return tree_unflatten(leaves, flat[0][1])
