"""Losses: loss(logits, labels), as torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from unisono.compat.language import say
from unisono.compat.mindspore.nn.cell import Cell
from unisono.errors import UsageError

REDUCTIONS = ("mean", "sum", "none")


class LossBase(Cell):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise UsageError(
                say(
                    f"reduction={reduction!r}: expected one of {', '.join(REDUCTIONS)}",
                    f"reduction={reduction!r}：应为 {', '.join(REDUCTIONS)} 之一",
                )
            )
        self.reduction = reduction

    def get_loss(self, x: torch.Tensor, weights: Any = 1.0) -> torch.Tensor:
        """Reduced, after the weights."""
        weighted = x * weights
        return weighted if self.reduction == "none" else getattr(weighted, self.reduction)()


class MSELoss(LossBase):
    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(logits, labels, reduction=self.reduction)


class L1Loss(LossBase):
    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(logits, labels, reduction=self.reduction)


class SoftmaxCrossEntropyWithLogits(LossBase):
    """sparse: labels are classes; otherwise they have a probability a class. MindSpore's default reduction is none."""

    def __init__(self, sparse: bool = False, reduction: str = "none") -> None:
        super().__init__(reduction)
        self.sparse = sparse

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels.long() if self.sparse else labels, reduction=self.reduction)


class CrossEntropyLoss(LossBase):
    def __init__(
        self, weight: Any = None, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
    ) -> None:
        super().__init__(reduction)
        self.weight, self.ignore_index, self.label_smoothing = weight, ignore_index, label_smoothing

    def construct(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            logits,
            labels if labels.is_floating_point() else labels.long(),
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
