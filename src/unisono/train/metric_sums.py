"""Metrics of one global batch, from what the ranks that compute its loss see of it: in an evaluation and in training.

Each rank adds up the sums of its own samples, part by part; one all-reduce makes them those of the batch. In training
the outputs are those that the step's own loss was computed from, so no second forward is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import REPLICAS
from unisono.train.metrics import Function, Metric, number_of

TRAIN = "train_"  # before the name of a metric of training batches


class MetricSums:
    """The sums of metrics over the parts of a batch: `observe` each of them, then `total`."""

    def __init__(self, trainer: Trainer, metrics: Mapping[str, Metric]) -> None:
        self._trainer = trainer
        self._metrics = metrics
        self._local: dict[str, torch.Tensor] = {}
        self._lengths: dict[str, int] | None = None  # of the sums, which ranks without outputs must hear once
        for metric in metrics.values():
            metric.trained_with(trainer.loss.loss, is_sharded=trainer.plan.cp > 1)

    @torch.no_grad()
    def observe(self, outputs: Any, targets: Any) -> None:
        for name, metric in self._metrics.items():
            part = metric.sums(outputs, targets)
            if not isinstance(part, torch.Tensor) or part.ndim != 1:
                shown = f"a tensor of shape {list(part.shape)}" if isinstance(part, torch.Tensor) else repr(part)
                raise UsageError(f"metric {name!r}: its sums are {shown}; expected a tensor with one dim")
            part = part.detach().double()
            self._local[name] = self._local[name] + part if name in self._local else part

    def total(self) -> dict[str, torch.Tensor]:
        """Over the global batch; every rank calls it."""
        local, self._local = {name: part.cpu() for name, part in self._local.items()}, {}
        mesh = self._trainer.mesh
        if self._lengths is None:
            lengths = mesh.comm("pp").all_gather_object(
                {name: len(part) for name, part in local.items()}, only_data=True
            )
            self._lengths = max(lengths, key=len)  # only the last stage has outputs
        length = self._lengths
        none = {name: torch.zeros(length[name], dtype=torch.double) for name in self._metrics}
        flat = torch.cat([local.get(name, none[name]) for name in self._metrics])
        if len(flat) != sum(length.values()):
            raise UsageError(
                f"the sums of metrics {', '.join(self._metrics)} have {len(flat)} numbers, but {sum(length.values())} "
                "in the batch before; expected as many for every batch"
            )
        mesh.comm(*REPLICAS).all_reduce(flat)
        mesh.comm("pp").all_reduce(flat)
        return dict(zip(self._metrics, flat.split([length[name] for name in self._metrics]), strict=True))


class TrainingMetrics:
    """The metrics of training steps, by the names of the history: "train_accuracy"."""

    def __init__(self, trainer: Trainer, metrics: Mapping[str, Metric | Function]) -> None:
        """Refuses what cannot be the metric of the global batch: UsageError."""
        if not metrics:
            raise UsageError(
                'metrics of training batches were asked for, but the engine has none; give Engine(metrics=["accuracy"])'
            )
        summed = {name: each for name, each in metrics.items() if isinstance(each, Metric)}
        self._functions = {name: each for name, each in metrics.items() if not isinstance(each, Metric)}
        plan = trainer.plan
        is_split = trainer.part[1] * plan.microbatches * plan.cp * plan.pp > 1
        if self._functions and is_split:
            raise UsageError(
                f"metric {next(iter(self._functions))!r} is a function, which needs the outputs of the full batch at "
                f"once, but plan {plan} computes a training step in parts; use a uni.Metric, which sums over parts, or "
                "leave metrics of training batches to evaluate"
            )
        self._trainer = trainer
        self._summed = summed
        self._sums = MetricSums(trainer, summed)
        self._values: dict[str, float] = {}

    def observe(self, outputs: Any, targets: Any) -> None:
        self._sums.observe(outputs, targets)
        for name, function in self._functions.items():
            self._values[name] = number_of(name, function(outputs, targets))

    def values(self) -> dict[str, float]:
        """Of the step that was observed; every rank calls it."""
        found = dict(self._values)
        if self._summed:
            totals = self._sums.total()
            found |= {name: number_of(name, each.value(totals[name])) for name, each in self._summed.items()}
        return {TRAIN + name: value for name, value in found.items()}
