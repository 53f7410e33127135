"""Callback, and the StepInfo that it receives. The progress display and the run folder are callbacks too.

Every rank calls them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.train.engine import Engine

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unisono.errors import UsageError
from unisono.parallel.share import Share
from unisono.train.checkpoint.checkpoints import Checkpoints
from unisono.train.data.sampler import require_whole_number


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
    ends_epoch: bool = False
    is_logged: bool = True  # whether `log_every` has the step in logs
    gradient_norm: float | None = None  # of the full model, before clipping; with `norms`, in steps that are logged
    weight_norm: float | None = None  # of the full model, after the step
    metrics: dict[str, float] = field(default_factory=dict)  # of the step's batch, with fit(train_metrics=True)
    mfu: float | None = None  # model FLOPs utilization: the share of the devices' peak, where that is known

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
        line |= {f"rate_{number}": rate for number, rate in enumerate(self.rates) if number}
        line |= self.metrics
        for name in ("gradient_norm", "weight_norm", "mfu"):
            if getattr(self, name) is not None:
                line[name] = getattr(self, name)
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
    """Override the methods that you need. A callback that returns True from `on_step`, `on_evaluation` or `on_epoch`,
    on any rank, ends the run on all ranks."""

    reason = "a callback ended it"  # History.stopped of a run that it ends
    ends_runs = True  # whether it may return True; without such callbacks ranks need not agree after each step

    def on_start(self, engine: Engine, first_step: int, steps: int | None) -> None:
        """Before the first step: steps done before (after a resume), and steps of the full run."""

    def on_step(self, engine: Engine, info: StepInfo) -> bool | None:
        """After each step."""

    def evaluating(self, engine: Engine) -> contextlib.AbstractContextManager[None]:
        """Entered around each evaluation, and around the `on_evaluation` of all callbacks."""
        return contextlib.nullcontext()

    def on_evaluation(self, engine: Engine, info: StepInfo) -> bool | None:
        """After each evaluation, with its values: at the end of an epoch, and after every `evaluate_every` steps."""

    def on_epoch(self, engine: Engine, info: StepInfo) -> bool | None:
        """After each epoch, with the values of its evaluation."""

    def on_save(self, engine: Engine, step: int, path: str) -> None:
        """After the start of a checkpoint, which is written in the background."""

    def on_end(self, engine: Engine, info: StepInfo | None) -> None:
        """After the last step, also when the run was stopped or failed."""

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep of the callback, the same on all ranks: numbers, strings and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a resume."""


class BestValue(Callback):
    """Follows the best value of a metric.

    monitor: a value of the evaluation, as "validation_loss". mode: whether less ("min") or more ("max") is better;
    without it, less of a loss, a perplexity or an error, more of an accuracy or a "top5". min_delta: a change of no
    more than this is no improvement.
    """

    def __init__(self, monitor: str = "validation_loss", *, mode: str | None = None, min_delta: float = 0.0) -> None:
        self.monitor, self.min_delta = monitor, min_delta
        self._sign = _sign_of(type(self).__name__, monitor, mode)
        if isinstance(min_delta, bool) or not isinstance(min_delta, int | float) or not min_delta >= 0:
            raise UsageError(f"{type(self).__name__}(min_delta={min_delta!r}): expected a number of at least 0")
        self.best: float | None = None
        self.best_step = 0

    def on_evaluation(self, engine: Engine, info: StepInfo) -> bool | None:
        if self.monitor not in info.values:
            raise UsageError(
                f"{type(self).__name__} monitors {self.monitor!r}, but the evaluation gives "
                f"{', '.join(info.values)}; expected one of these"
            )
        value = info.values[self.monitor]
        is_better = self.best is None or self._sign * (self.best - value) > self.min_delta
        if math.isfinite(value) and is_better:
            self.best, self.best_step = value, info.step
        return self.on_value(engine, info, is_best=self.best_step == info.step)

    def on_value(self, engine: Engine, info: StepInfo, *, is_best: bool) -> bool | None:
        """After each evaluation; is_best: its value is the best so far."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step = state["best"], state["best_step"]


class EarlyStopping(BestValue):
    """Ends the run after evaluations in a row without an improvement of a metric.

    uni.Engine(...).fit(data, validation=held_out, callbacks=[uni.EarlyStopping("validation_loss", patience=3)])

    Args:
        monitor: The name of the value.
        patience: Evaluations without an improvement.
        mode: "min" or "max": which value is best; default: "min" for a loss, a perplexity or an error, "max" for an
            accuracy or a "top5".
        min_delta: A change of no more than this is no improvement.
    """

    def __init__(
        self,
        monitor: str = "validation_loss",
        patience: int = 3,
        *,
        mode: str | None = None,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode=mode, min_delta=min_delta)
        self.patience = require_whole_number("EarlyStopping: patience", patience, 1)
        self.waited = 0  # evaluations since the best value

    def on_value(self, engine: Engine, info: StepInfo, *, is_best: bool) -> bool:
        self.waited = 0 if is_best else self.waited + 1
        best = "none was finite" if self.best is None else f"the best was {self.best:.4g}, at step {self.best_step}"
        self.reason = f"{self.monitor} has not improved in {self.waited} evaluations: {best}"
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.waited = state["waited"]


class SaveBest(BestValue):
    """Keeps a checkpoint of the step with the best value of a metric; `Engine.fit(save_best=...)` adds it."""

    ends_runs = False

    def __init__(self, monitor: str, folder: Path) -> None:
        super().__init__(monitor)
        self._checkpoints = Checkpoints(folder, keep=1)

    def on_value(self, engine: Engine, info: StepInfo, *, is_best: bool) -> None:
        if is_best:
            self._checkpoints.save(engine.ready, info.step, extra=engine.own_state())

    def on_end(self, engine: Engine, info: StepInfo | None) -> None:
        self._checkpoints.close()


_LESS, _MORE = ("loss", "perplexity", "error"), ("accuracy", "top")


def _sign_of(kind: str, monitor: Any, mode: str | None) -> int:
    if not isinstance(monitor, str):
        raise UsageError(f'{kind}(monitor={monitor!r}): expected the name of a value, as "validation_loss"')
    if mode not in ("min", "max", None):
        raise UsageError(f'{kind}(mode={mode!r}): expected "min" or "max"')
    if mode is None:
        signs = {sign for names, sign in ((_LESS, 1), (_MORE, -1)) if any(name in monitor for name in names)}
        if len(signs) != 1:
            raise UsageError(
                f'{kind}(monitor={monitor!r}): whether less or more of it is better is not known; give mode="min" or '
                'mode="max"'
            )
        return signs.pop()
    return 1 if mode == "min" else -1
