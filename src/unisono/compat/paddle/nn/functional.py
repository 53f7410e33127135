"""Paddle's functions of networks: over torch's, with Paddle's arguments and its labels of shape [B, 1]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from unisono.compat.language import say
from unisono.compat.paddle.paddle_names import missing_names
from unisono.compat.paddle.tensor import dtype_of
from unisono.errors import UsageError


def class_labels(input: Any, label: Any, axis: int = -1) -> Any:
    """Labels without the dim of 1 that Paddle allows for the classes."""
    along = axis % input.dim()
    if label.dim() == input.dim() and label.shape[along] == 1:
        return label.squeeze(along)
    if label.dim() == input.dim() - 1:
        return label
    shapes = f"{list(input.shape)} / {list(label.shape)}"
    raise UsageError(
        say(
            f"cross_entropy of input and label of shapes {shapes}: as in Paddle, labels are [B, 1] or [B] for an input "
            "[B, classes]; give class numbers, or soft_label=True for probabilities",
            f"cross_entropy 的 input / label 形状为 {shapes}：与飞桨相同，input 为 [B, classes] 时 label 应为 [B, 1] "
            "或 [B]；"
            "若 label 是概率请设 soft_label=True",
        )
    )


def cross_entropy(
    input: Any,
    label: Any,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    soft_label: bool = False,
    axis: int = -1,
    use_softmax: bool = True,
    label_smoothing: float = 0.0,
    name: str | None = None,
) -> Any:
    """The mean over samples by default. Labels are [B, 1] or [B]; with soft_label, probabilities."""
    if not use_softmax:
        raise UsageError(
            say(
                "cross_entropy(use_softmax=False) takes probabilities in Paddle; here give logits, or use "
                "nll_loss(paddle.log(input), label)",
                "飞桨的 cross_entropy(use_softmax=False) 接受概率；这里请给出 logits",
            )
        )
    has_classes = label.dim() == input.dim()  # as [B, 1] or, with soft_label, [B, classes]
    along = axis % input.dim()
    if soft_label:
        label = label.movedim(along, 1)
    else:
        label = class_labels(input, label, along)
    losses = F.cross_entropy(
        input.movedim(along, 1),
        label,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return losses.unsqueeze(along) if reduction == "none" and has_classes else losses


def mse_loss(input: Any, label: Any, reduction: str = "mean", name: str | None = None) -> Any:
    return F.mse_loss(input, label, reduction=reduction)


def linear(x: Any, weight: Any, bias: Any = None, name: str | None = None) -> Any:
    """x times a weight of shape (inputs, outputs)."""
    y = torch.matmul(x, weight)
    return y if bias is None else y + bias


def relu(x: Any, name: str | None = None) -> Any:
    return F.relu(x)


def gelu(x: Any, approximate: bool = False, name: str | None = None) -> Any:
    return F.gelu(x, approximate="tanh" if approximate else "none")


def sigmoid(x: Any, name: str | None = None) -> Any:
    return torch.sigmoid(x)


def softmax(x: Any, axis: int = -1, dtype: Any = None, name: str | None = None) -> Any:
    return F.softmax(x, axis, dtype=None if dtype is None else dtype_of(dtype))


def dropout(
    x: Any,
    p: float = 0.5,
    axis: Any = None,
    training: bool = True,
    mode: str = "upscale_in_train",
    name: str | None = None,
) -> Any:
    if axis is not None or mode != "upscale_in_train":
        raise UsageError(
            say(
                f"dropout(axis={axis!r}, mode={mode!r}): Paddle also drops along axes and scales in evaluation; here "
                "each element is dropped for itself and scaled in training, axis=None and mode='upscale_in_train'",
                f"dropout(axis={axis!r}, mode={mode!r})：飞桨还可按轴丢弃或在预测时缩放；这里逐元素丢弃并在训练时缩放，"
                "请用 axis=None 和 mode='upscale_in_train'",
            )
        )
    return F.dropout(x, p, training)


__getattr__ = missing_names(__name__)
