"""Callback, and the StepInfo that it receives. The progress display and the run folder are callbacks too.

Every rank calls them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.train.engine import Engine

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unisono.parallel.share import Share


@dataclass
class StepInfo:
    """After step `step` (from 1) of a run."""

    step: int
    epoch: int  # from 1
    epochs: int
    steps: int | None  # of the run; None if the data has no length
    loss: float
    rates: tuple[float, ...]  # learning rates, one for each parameter group
    samples: int  # in the global batch of the step
    tokens: int | None
    seconds: float  # duration of the step
    predicted: float | None = None  # duration predicted by the planner
    memory: tuple[int, ...] = ()  # peak bytes by rank; empty for steps that are not sampled
    slow: str = ""  # describes a straggler, if there is one
    ids: Sequence[int] = ()  # indices of the samples
    skipped: bool = False  # the loss was not finite and no update was made
    values: dict[str, float] = field(default_factory=dict)  # of metrics, after an evaluation

    def numbers(self) -> dict[str, Any]:
        """As a line of the log of the run."""
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


def tokens_of(batch: Any, batch_size: int) -> int | None:
    """Number of tokens in a global batch of `batch_size` samples, if inputs are token ids of shape (samples,
    length)."""
    inputs = (batch.batch if isinstance(batch, Share) else batch)[0]
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return batch_size * leaf.shape[1]
    return None


class Callback:
    """Override the methods that you need. A callback that returns True from `on_step` or `on_epoch`, on any rank, ends
    the run on all ranks."""

    def on_start(self, engine: Engine, first_step: int, steps: int | None) -> None:
        """Before the first step: steps done before (after a resume), and steps of the full run."""

    def on_step(self, engine: Engine, info: StepInfo) -> bool | None:
        """After each step."""

    def on_epoch(self, engine: Engine, info: StepInfo) -> bool | None:
        """After each epoch, with the values of its evaluation."""

    def on_save(self, engine: Engine, step: int, path: str) -> None:
        """After the start of a checkpoint, which is written in the background."""

    def on_end(self, engine: Engine, info: StepInfo | None) -> None:
        """After the last step, also when the run was stopped or failed."""
