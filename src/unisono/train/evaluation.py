"""The loss and the metrics of a model on whole data, from what each rank computes of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.parallel.share import Share, first_rows
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import REPLICAS
from unisono.train.metrics import Function, Metric, number_of


def evaluate(trainer: Trainer, batches: Iterable[Any], metrics: dict[str, Metric | Function]) -> dict[str, float]:
    """The mean loss over the samples of all batches, and each metric; the same on every rank.

    `batches` are this rank's shares, or whole; functions among the metrics need whole ones (see `needs_whole`).
    """
    summed = {name: metric for name, metric in metrics.items() if isinstance(metric, Metric)}
    asked = {name: metric for name, metric in metrics.items() if not isinstance(metric, Metric)}
    sums: dict[str, torch.Tensor] = {}
    totals = dict.fromkeys(("loss", *asked), 0.0)
    samples = 0
    for batch in batches:
        rows = batch.of if isinstance(batch, Share) else first_rows(batch, trainer.batch_dim)
        loss, parts = _sums_of(trainer, batch, summed)
        for name, part in parts.items():
            sums[name] = sums[name] + part if name in sums else part
        totals["loss"] += rows * float(loss)
        if asked:
            inputs, targets = _whole(batch, next(iter(asked)))
            outputs = trainer.predict(inputs)
            for name, function in asked.items():
                totals[name] += rows * number_of(name, function(outputs, targets))
        samples += rows
    if not samples:
        raise UsageError("the dataset to evaluate is empty; expected at least one sample")
    means = {name: total / samples for name, total in totals.items()}
    return means | {name: number_of(name, summed[name].value(each)) for name, each in sums.items()}


def needs_whole(metrics: dict[str, Metric | Function]) -> bool:
    """Whether every rank must have whole batches to answer for these metrics."""
    return any(not isinstance(metric, Metric) for metric in metrics.values())


def _whole(batch: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(batch, Share):
        return batch[0], batch[1]
    if len(batch.positions) < batch.of:
        raise UsageError(
            f"metric {name!r} is a function, which is asked with whole batches, but the loader gives a rank its part: "
            "make it with Loader(..., whole=True), or give the dataset itself"
        )
    inputs, targets = batch.batch
    return inputs, targets


def _sums_of(trainer: Trainer, batch: Any, metrics: dict[str, Metric]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one batch, and what each metric sums over it."""
    if not metrics:
        return trainer.evaluate(batch), {}
    mine: dict[str, torch.Tensor] = {}
    for metric in metrics.values():
        metric.trained_with(trainer.loss.loss, is_spread=trainer.plan.cp > 1)

    def observe(outputs: Any, targets: Any) -> None:
        for name, metric in metrics.items():
            part = metric.sums(outputs, targets)
            if not isinstance(part, torch.Tensor) or part.ndim != 1:
                shown = f"a tensor of shape {list(part.shape)}" if isinstance(part, torch.Tensor) else repr(part)
                raise UsageError(f"metric {name!r}: its sums are {shown}; expected a tensor with one dim")
            part = part.detach().cpu().double()
            mine[name] = mine[name] + part if name in mine else part

    loss = trainer.evaluate(batch, observe)
    lengths = trainer.mesh.comm("pp").all_gather_object({name: len(part) for name, part in mine.items()})
    length = max(lengths, key=len)  # only the last stage has seen outputs
    flat = torch.cat([mine.get(name, torch.zeros(length[name], dtype=torch.double)) for name in metrics])
    trainer.mesh.comm(*REPLICAS).all_reduce(flat)
    trainer.mesh.comm("pp").all_reduce(flat)
    parts = flat.split([length[name] for name in metrics])
    return loss, dict(zip(metrics, parts, strict=True))
