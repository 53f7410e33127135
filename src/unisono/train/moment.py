"""A moment of a run: what is known after a step. Callbacks, the display and the run folder all read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unisono.parallel.share import Share


@dataclass
class Moment:
    """After step `step` (from 1) of a run."""

    step: int
    epoch: int  # from 1
    epochs: int
    steps: int | None  # in the whole run; None where the data has no length
    loss: float
    rates: tuple[float, ...]  # learning rates, one a group of the optimizer
    samples: int  # of the step's global batch
    tokens: int | None
    seconds: float  # that the step took
    predicted: float | None = None  # what the planner said it would take
    memory: tuple[int, ...] = ()  # bytes at the peak, by rank; empty between two looks
    slow: str = ""  # the rank that the others wait for, if one stands out
    ids: Sequence[int] = ()  # of the samples
    skipped: bool = False  # the loss was not finite and the step was left out
    values: dict[str, float] = field(default_factory=dict)  # of metrics, after an evaluation

    def numbers(self) -> dict[str, Any]:
        """As a line of the run's log."""
        line: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "rate": self.rates[0] if self.rates else None,
            "seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds if self.seconds else None,
        }
        if self.tokens is not None:
            line["tokens_per_second"] = self.tokens / self.seconds if self.seconds else None
        if self.predicted is not None:
            line["predicted_seconds"] = self.predicted
        if self.memory:
            line["memory"] = list(self.memory)
        if self.slow:
            line["slow"] = self.slow
        if self.skipped:
            line["skipped"] = True
        return line | self.values


def tokens_of(batch: Any, rows: int) -> int | None:
    """How many tokens a global batch of `rows` samples has, where it is one of token numbers: (samples, length)."""
    inputs = (batch.batch if isinstance(batch, Share) else batch)[0]
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return rows * leaf.shape[1]
    return None
