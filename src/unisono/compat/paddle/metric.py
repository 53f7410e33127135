"""paddle.metric: the share of samples whose class is among the k with the highest scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from unisono.compat.paddle.nn.functional import class_labels
from unisono.compat.paddle.paddle_names import missing_names
from unisono.compat.paddle.tensor import plain


def is_correct(input: Any, label: Any, k: int) -> Any:
    """For each sample, whether its class is among the k with the highest scores."""
    found = torch.topk(input, min(k, input.shape[-1]), -1)[1]
    return torch.eq(found, class_labels(input, label).unsqueeze(-1)).any(-1)


def accuracy(
    input: Any, label: Any, k: int = 1, correct: Any = None, total: Any = None, name: str | None = None
) -> Any:
    return is_correct(input, label, k).to(torch.float32).mean()


class Metric:
    """A metric of one's own has reset, update, accumulate and name."""

    def compute(self, *args: Any) -> Any:
        return args


class Accuracy(Metric):
    """Of all samples since `reset`; named acc, or acc_top1 and acc_top5 where topk has several."""

    def __init__(self, topk: Sequence[int] = (1,), name: str | None = None) -> None:
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        prefix = name or "acc"
        self._name = [prefix] if self.topk == (1,) else [f"{prefix}_top{k}" for k in self.topk]
        self.reset()

    def compute(self, pred: Any, label: Any, *args: Any) -> Any:
        """For each sample and k whether it is right."""
        return torch.stack([is_correct(pred, label, k) for k in self.topk], -1)

    def update(self, correct: Any, *args: Any) -> Any:
        """Add samples; the accuracies of these."""
        rights = np.asarray(plain(correct).detach() if isinstance(correct, torch.Tensor) else correct)
        self._correct += rights.sum(0)
        self._count += len(rights)
        shares = rights.mean(0)
        return shares[0] if len(shares) == 1 else shares

    def reset(self) -> None:
        self._correct = np.zeros(len(self.topk))
        self._count = 0

    def accumulate(self) -> Any:
        shares = [float(right) / self._count if self._count else 0.0 for right in self._correct]
        return shares[0] if len(shares) == 1 else shares

    def name(self) -> list[str]:
        return self._name


__getattr__ = missing_names(__name__)
