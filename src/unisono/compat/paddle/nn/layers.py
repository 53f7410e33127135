"""Paddle's layers, as far as its distributed programs use them. A Linear's weight is (inputs, outputs)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.compat.language import say
from unisono.compat.paddle.nn import functional
from unisono.compat.paddle.nn.initializer import Constant, Initializer, XavierUniform
from unisono.compat.paddle.nn.layer import Layer
from unisono.errors import UsageError


class ParamAttr:
    """How a parameter is made; as paddle.ParamAttr, of which initializer and trainable count here."""

    def __init__(
        self,
        name: str | None = None,
        initializer: Initializer | None = None,
        learning_rate: float = 1.0,
        regularizer: Any = None,
        trainable: bool = True,
    ) -> None:
        if learning_rate != 1.0 or regularizer is not None:
            raise UsageError(
                say(
                    "ParamAttr(learning_rate=, regularizer=) sets them for one parameter in Paddle; here they are set "
                    "for all of an optimizer: make one optimizer with the values for all",
                    "飞桨的 ParamAttr(learning_rate=, regularizer=) 只作用于单个参数；这里请在优化器上统一设置",
                )
            )
        self.name, self.initializer, self.trainable = name, initializer, trainable


def _parameter(shape: tuple[int, ...], attr: Any, default: Initializer) -> nn.Parameter:
    attr = ParamAttr(initializer=attr) if isinstance(attr, Initializer) else attr or ParamAttr()
    made = nn.Parameter(torch.empty(shape), requires_grad=attr.trainable)
    (attr.initializer or default)(made)
    return made


class Linear(Layer):
    """x W + b, with W of shape (in_features, out_features). bias_attr=False: without b."""

    HAS_TRANSPOSED_WEIGHT = True  # beside torch's layout: tensor parallelism shards it by the other dim
    PRODUCTS = ("weight",)

    def __init__(
        self, in_features: int, out_features: int, weight_attr: Any = None, bias_attr: Any = None, name: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = _parameter((in_features, out_features), weight_attr, XavierUniform())
        bias = None if bias_attr is False else _parameter((out_features,), bias_attr, Constant(0.0))
        self.register_parameter("bias", bias)

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Embedding(Layer, nn.Embedding):
    """Rows of a weight of shape (num_embeddings, embedding_dim)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, padding_idx)


class LayerNorm(Layer, nn.LayerNorm):
    def __init__(self, normalized_shape: Any, epsilon: float = 1e-5) -> None:
        nn.LayerNorm.__init__(self, normalized_shape, epsilon)


class ReLU(Layer):
    def __init__(self, name: str | None = None) -> None:
        super().__init__()

    def forward(self, x: Any) -> Any:
        return functional.relu(x)


class GELU(Layer):
    def __init__(self, approximate: bool = False, name: str | None = None) -> None:
        super().__init__()
        self._approximate = approximate

    def forward(self, x: Any) -> Any:
        return functional.gelu(x, self._approximate)


class Dropout(Layer):
    def __init__(
        self, p: float = 0.5, axis: Any = None, mode: str = "upscale_in_train", name: str | None = None
    ) -> None:
        super().__init__()
        self.p, self.axis, self.mode = p, axis, mode

    def forward(self, x: Any) -> Any:
        return functional.dropout(x, self.p, self.axis, self.training, self.mode)


class CrossEntropyLoss(Layer):
    """The cross entropy of logits; labels are [B, 1] or [B]."""

    def __init__(
        self,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        soft_label: bool = False,
        axis: int = -1,
        use_softmax: bool = True,
        label_smoothing: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._given: dict[str, Any] = {
            "weight": weight, "ignore_index": ignore_index, "reduction": reduction, "soft_label": soft_label,
            "axis": axis, "use_softmax": use_softmax, "label_smoothing": label_smoothing,
        }  # fmt: skip

    def forward(self, input: Any, label: Any) -> Any:
        return functional.cross_entropy(input, label, **self._given)


class MSELoss(Layer):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self._reduction = reduction

    def forward(self, input: Any, label: Any) -> Any:
        return functional.mse_loss(input, label, self._reduction)
