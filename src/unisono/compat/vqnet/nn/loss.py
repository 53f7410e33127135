"""Losses, which VQNet calls with the target first: loss(target, output)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from unisono.compat.vqnet.nn.module import Module
from unisono.errors import UsageError


class CrossEntropyLoss(Module):
    """The mean cross entropy of logits (samples, classes); targets are classes, (samples,) or (samples, 1)."""

    def forward(self, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if not output.is_floating_point():
            raise UsageError(
                f"CrossEntropyLoss(target, output): the output is {output.dtype}; expected logits. The target is first"
            )
        if not target.is_floating_point() and target.dim() == output.dim() and target.shape[1] == 1:
            target = target.squeeze(1)
        return F.cross_entropy(output, target)


class MeanSquaredError(Module):
    def forward(self, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if target.shape != output.shape:
            raise UsageError(
                f"MeanSquaredError(target, output): shapes {tuple(target.shape)} and {tuple(output.shape)}; "
                "expected the same"
            )
        return F.mse_loss(output, target)
