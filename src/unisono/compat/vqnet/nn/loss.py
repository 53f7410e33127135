"""Losses, which VQNet calls with the target first: loss(target, output)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from unisono.compat.language import say
from unisono.compat.vqnet.nn.module import Module
from unisono.errors import UsageError


class CrossEntropyLoss(Module):
    """The mean cross entropy of logits (samples, classes); targets are classes, (samples,) or (samples, 1)."""

    def forward(self, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if not output.is_floating_point():
            raise UsageError(
                say(
                    f"CrossEntropyLoss(target, output): the output is {output.dtype}; expected logits. The "
                    "target is first",
                    f"CrossEntropyLoss(target, output)：output 为 {output.dtype}；应为 logits，且 target 在前",
                )
            )
        if not target.is_floating_point() and target.dim() == output.dim() and target.shape[1] == 1:
            target = target.squeeze(1)
        return F.cross_entropy(output, target)


class MeanSquaredError(Module):
    def forward(self, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        _require_same_shape("MeanSquaredError", target, output)
        return F.mse_loss(output, target)


class BinaryCrossEntropy(Module):
    """The mean binary cross entropy of probabilities."""

    def forward(self, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        _require_same_shape("BinaryCrossEntropy", target, output)
        return F.binary_cross_entropy(output, target.to(output.dtype))


class CategoricalCrossEntropy(Module):
    """The mean cross entropy of logits (samples, classes) with one-hot targets of the same shape."""

    def forward(self, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        _require_same_shape(type(self).__name__, target, output)
        return F.cross_entropy(output, target.to(output.dtype))


class SoftmaxCrossEntropy(CategoricalCrossEntropy):
    """The same; VQNet has both."""


class NLL_Loss(Module):
    """The mean of -output[target] for log-probabilities (samples, classes)."""

    def forward(self, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(output, target.reshape(-1) if output.dim() == 2 else target)


def _require_same_shape(name: str, target: torch.Tensor, output: torch.Tensor) -> None:
    if target.shape != output.shape:
        raise UsageError(
            say(
                f"{name}(target, output): shapes {tuple(target.shape)} and {tuple(output.shape)}; expected the same",
                f"{name}(target, output)：形状为 {tuple(target.shape)} 和 {tuple(output.shape)}；应当相同",
            )
        )
