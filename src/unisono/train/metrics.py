"""Metrics over a dataset of which each rank has seen a part.

    uni.Engine(..., metrics=["accuracy", Accuracy(k=5), "perplexity", my_function])

A Metric defines sums over samples and their value; each rank sums over its own samples, and only the sums are
communicated. A function (outputs, targets) -> number is called with the outputs of a global batch on every rank, and
its results are averaged over the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.errors import UsageError

Function = Callable[[Any, Any], Any]


class Metric:
    """`sums` over a part of the data, and the `value` of the sums over all of it."""

    name = "metric"

    def trained_with(self, loss: Function, is_sharded: bool) -> None:
        """Called before `sums` with the training loss, and whether a rank has only some tokens of a sequence (cp)."""

    def sums(self, outputs: Any, targets: Any) -> torch.Tensor:
        raise AssertionError(f"{type(self).__name__} has no sums")

    def value(self, sums: torch.Tensor) -> float:
        raise AssertionError(f"{type(self).__name__} has no value")


class Accuracy(Metric):
    """The fraction of targets among the k largest outputs.

    Args:
        k: How many outputs count.
        ignored: Targets equal to it are not counted.
    """

    def __init__(self, k: int = 1, ignored: int = -100) -> None:
        if not isinstance(k, int) or k < 1:
            raise UsageError(f"Accuracy(k={k!r}): expected a whole number of at least 1")
        self.k = k
        self.ignored = ignored
        self.name = "accuracy" if k == 1 else f"top{k}"

    def sums(self, outputs: Any, targets: Any) -> torch.Tensor:
        scores = _class_last(_scores(outputs), targets, self.name)
        if scores.shape[-1] < self.k:
            raise UsageError(f"{self.name}: the outputs have {scores.shape[-1]} classes; expected at least {self.k}")
        counted = targets != self.ignored
        best = scores.topk(self.k, dim=-1).indices
        right = (best == targets.unsqueeze(-1)).any(-1) & counted
        return torch.stack([right.sum(), counted.sum()]).double()

    def value(self, sums: torch.Tensor) -> float:
        return float(sums[0] / sums[1]) if sums[1] else math.nan


class Perplexity(Metric):
    """exp of the mean cross entropy of the training loss.

    By comparison with the loss it is found whether that takes each output with its own target or, if the loss shifts
    targets, with the next one. A loss that is neither is refused, unless `shift` is given.

    Args:
        ignored: Targets equal to it are not counted.
        shift: 0 or 1: how far the loss shifts targets.
    """

    name = "perplexity"

    def __init__(self, ignored: int = -100, shift: int | None = None) -> None:
        if shift not in (None, 0, 1):
            raise UsageError(f"Perplexity(shift={shift!r}): expected 0, 1 or None")
        self.ignored = ignored
        self.shift = shift
        self._loss: Function | None = None
        self._is_sharded = False

    def trained_with(self, loss: Function, is_sharded: bool) -> None:
        self._loss, self._is_sharded = loss, is_sharded

    def sums(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Cross entropies and their counts by shift; and how often the loss was either of their means, or neither."""
        scores = _class_last(_scores(outputs), targets, self.name)
        exact = scores if scores.dtype == torch.float64 else scores.float()
        by_shift = [self._cross_entropy(exact, targets)]
        has_next = targets.dim() > 1 and not self._is_sharded  # under cp the next token may be on another rank
        by_shift.append(self._cross_entropy(exact[:, :-1], targets[:, 1:]) if has_next else torch.zeros(2).double())
        votes = self._votes(by_shift, outputs, targets).to(by_shift[0].device)
        return torch.cat([*(each.to(votes.device) for each in by_shift), votes])

    def _cross_entropy(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        lost = torch.nn.functional.cross_entropy(
            scores.flatten(0, -2), targets.flatten(), ignore_index=self.ignored, reduction="sum"
        )
        return torch.stack([lost.double(), (targets != self.ignored).sum().double()])

    def _votes(self, by_shift: list[torch.Tensor], outputs: Any, targets: Any) -> torch.Tensor:
        votes = torch.zeros(3).double()
        if self.shift is not None or self._loss is None:
            votes[self.shift or 0] = 1
            return votes
        given = self._loss(outputs, targets)
        if not bool(given.isfinite()):
            return votes  # no targets to count
        near = 1e-4 if given.dtype in (torch.float32, torch.float64) else 2e-2
        means = [float(lost / count) if count else math.nan for lost, count in by_shift]
        fits = [math.isclose(float(given), mean, rel_tol=near, abs_tol=1e-6) for mean in means]
        if not all(fits):  # else the batch does not distinguish them
            votes[fits.index(True) if any(fits) else 2] = 1
        return votes

    def value(self, sums: torch.Tensor) -> float:
        by_shift, votes = sums[:4].view(2, 2), sums[4:]
        if votes[2] or (votes[0] and votes[1]):
            raise UsageError(
                "metric 'perplexity' is exp of the mean cross entropy of the outputs and their targets, or the next "
                "ones, but the training loss is neither (or, under cp, uses the next ones); give "
                "Perplexity(shift=0) or Perplexity(shift=1) to compute it from the outputs, whatever the loss is"
            )
        lost, count = by_shift[1 if votes[1] else 0]
        return math.exp(min(float(lost / count), 700.0)) if count else math.nan


_NAMED: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "top5": lambda: Accuracy(5),
    "perplexity": Perplexity,
}


def named(metrics: Sequence[str | Metric | Function] | None) -> dict[str, Metric | Function]:
    """The given metrics by name."""
    if isinstance(metrics, str) or callable(metrics) or isinstance(metrics, Metric):
        metrics = [metrics]
    if metrics is not None and not isinstance(metrics, Sequence):
        raise UsageError(f"metrics={metrics!r}: expected a list of names, Metrics and functions")
    found: dict[str, Metric | Function] = {}
    for each in metrics or ():
        if isinstance(each, str):
            if each not in _NAMED:
                raise UsageError(f"metric {each!r}: expected one of {', '.join(_NAMED)}, a Metric or a function")
            each = _NAMED[each]()
        if isinstance(each, type) and issubclass(each, Metric):
            raise UsageError(f"metric {each.__name__} is a class; expected an instance: {each.__name__}()")
        if not isinstance(each, Metric) and not callable(each):
            raise UsageError(f"metric {each!r}: expected one of {', '.join(_NAMED)}, a Metric or a function")
        name = each.name if isinstance(each, Metric) else getattr(each, "__name__", type(each).__name__)
        if name in found or name == "loss":
            raise UsageError(f"two metrics are named {name!r}; names must differ")
        found[name] = each
    return found


def number_of(name: str, answer: Any) -> float:
    """The result of a metric as a number; UsageError if it is none."""
    if isinstance(answer, torch.Tensor) and answer.numel() != 1:
        raise UsageError(f"metric {name!r} returned a tensor of shape {list(answer.shape)}; expected one number")
    try:
        if isinstance(answer, str):
            raise TypeError
        return float(answer)
    except (TypeError, ValueError):
        raise UsageError(f"metric {name!r} returned {type(answer).__name__}; expected one number") from None


def _scores(outputs: Any) -> torch.Tensor:
    """The class scores in the output of a model: the output itself, its `logits`, or the first of several."""
    outputs = getattr(outputs, "logits", outputs)
    if isinstance(outputs, dict) and "logits" in outputs:
        outputs = outputs["logits"]
    if isinstance(outputs, tuple | list) and outputs:
        outputs = outputs[0]
    if not isinstance(outputs, torch.Tensor):
        raise UsageError(f"a metric needs the classes' scores; the model returned {type(outputs).__name__}")
    return outputs


def _class_last(scores: torch.Tensor, targets: Any, name: str) -> torch.Tensor:
    """Scores with the classes in the last dim; the shape of the targets determines which dim they are in."""
    if isinstance(targets, torch.Tensor):
        if targets.shape == scores.shape[:-1]:
            return scores
        if scores.dim() > 2 and targets.shape == scores.shape[:1] + scores.shape[2:]:
            return scores.movedim(1, -1)
    shown = list(targets.shape) if isinstance(targets, torch.Tensor) else type(targets).__name__
    raise UsageError(
        f"{name}: outputs of shape {list(scores.shape)} and targets {shown}; expected a class for each row of scores"
    )
