"""Layers, with MindSpore's arguments and initial values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unisono.compat.language import say
from unisono.compat.mindspore.common.initializer import HeUniform, bound_of, initializer
from unisono.compat.mindspore.common.parameter import Parameter
from unisono.compat.mindspore.common.tensor import plain
from unisono.compat.mindspore.nn.cell import Cell
from unisono.errors import UsageError

Pair = int | tuple[int, int]
PAD_MODES = ("same", "valid", "pad")


class ReLU(Cell):
    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


class Sigmoid(Cell):
    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)


class Tanh(Cell):
    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class GELU(Cell):
    """approximate: by tanh, MindSpore's default."""

    def __init__(self, approximate: bool = True) -> None:
        super().__init__()
        self.approximate = "tanh" if approximate else "none"

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate=self.approximate)


class Softmax(Cell):
    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, self.axis)


class Flatten(Cell):
    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(x, self.start_dim, self.end_dim)


_ACTIVATIONS: dict[str, type[Cell]] = {
    "relu": ReLU,
    "sigmoid": Sigmoid,
    "tanh": Tanh,
    "gelu": GELU,
    "softmax": Softmax,
}


def _activation(given: Any) -> nn.Module | None:
    if given is None or isinstance(given, nn.Module):
        return given
    if given not in _ACTIVATIONS:
        raise UsageError(
            say(
                f"activation={given!r}: expected a Cell, or one of {', '.join(_ACTIVATIONS)}",
                f"activation={given!r}：应为 Cell，或 {', '.join(_ACTIVATIONS)} 之一",
            )
        )
    return _ACTIVATIONS[given]()


class Dense(Cell):
    """weight is (out_channels, in_channels), as torch's."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        weight_init: Any = None,
        bias_init: Any = None,
        has_bias: bool = True,
        activation: Any = None,
    ) -> None:
        super().__init__()
        weight = HeUniform(math.sqrt(5)) if weight_init is None else weight_init
        self.weight = Parameter(initializer(weight, [out_channels, in_channels]))
        self.bias: Parameter | None = None
        if has_bias:
            bias = bound_of(in_channels) if bias_init is None else bias_init
            self.bias = Parameter(initializer(bias, [out_channels]))
        self.activation = _activation(activation)

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        made = F.linear(x, self.weight, self.bias)
        return made if self.activation is None else self.activation(made)


class Conv2d(Cell):
    """pad_mode "same", the default, keeps sizes (divided by the stride), as MindSpore's."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        pad_mode: str = "same",
        padding: int | tuple[int, int, int, int] = 0,
        dilation: Pair = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        super().__init__()
        if pad_mode not in PAD_MODES:
            raise UsageError(
                say(
                    f"Conv2d(pad_mode={pad_mode!r}): expected one of {', '.join(PAD_MODES)}",
                    f"Conv2d(pad_mode={pad_mode!r})：应为 {', '.join(PAD_MODES)} 之一",
                )
            )
        if pad_mode != "pad" and padding != 0:
            raise UsageError(
                say(
                    f"Conv2d(padding={padding}) is for pad_mode='pad', and it is {pad_mode!r}",
                    f"Conv2d(padding={padding}) 仅用于 pad_mode='pad'，而它是 {pad_mode!r}",
                )
            )
        self.kernel, self.stride, self.dilation = _pair(kernel_size), _pair(stride), _pair(dilation)
        self.pad_mode, self.group = pad_mode, group
        self.padding = (padding,) * 4 if isinstance(padding, int) else tuple(padding)  # top, bottom, left, right
        weight = HeUniform(math.sqrt(5)) if weight_init is None else weight_init
        self.weight = Parameter(initializer(weight, [out_channels, in_channels // group, *self.kernel]))
        self.bias: Parameter | None = None
        if has_bias:
            fan_in = in_channels // group * math.prod(self.kernel)
            self.bias = Parameter(initializer(bound_of(fan_in) if bias_init is None else bias_init, [out_channels]))

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        top, bottom, left, right = self._sides(x.shape[-2:])
        if (top, left) == (bottom, right):
            return F.conv2d(x, self.weight, self.bias, self.stride, (top, left), self.dilation, self.group)
        x = F.pad(x, (left, right, top, bottom))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.group)

    def _sides(self, sizes: Any) -> tuple[int, ...]:
        if self.pad_mode == "pad":
            return self.padding
        if self.pad_mode == "valid":
            return (0, 0, 0, 0)
        sides: list[int] = []
        for size, kernel, stride, dilation in zip(sizes, self.kernel, self.stride, self.dilation, strict=True):
            total = max((math.ceil(size / stride) - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
            sides += [total // 2, total - total // 2]
        return tuple(sides)


class MaxPool2d(Cell):
    def __init__(self, kernel_size: Pair = 1, stride: Pair = 1, pad_mode: str = "valid") -> None:
        super().__init__()
        if pad_mode != "valid":
            raise UsageError(
                say(
                    f"MaxPool2d(pad_mode={pad_mode!r}): expected 'valid'",
                    f"MaxPool2d(pad_mode={pad_mode!r})：应为 'valid'",
                )
            )
        self.kernel, self.stride = _pair(kernel_size), _pair(stride)

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, self.kernel, self.stride)


class AvgPool2d(MaxPool2d):
    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, self.kernel, self.stride)


class Dropout(Cell):
    """keep_prob is the share that stays, MindSpore's old argument; p the share that is dropped."""

    def __init__(self, keep_prob: float = 0.5, p: float | None = None) -> None:
        super().__init__()
        self.p = 1 - keep_prob if p is None else p
        if not 0 <= self.p < 1:
            raise UsageError(
                say(
                    f"Dropout(keep_prob={keep_prob}, p={p}): expected p of at least 0 and below 1",
                    f"Dropout(keep_prob={keep_prob}, p={p})：p 应不小于 0 且小于 1",
                )
            )

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.p, self.training)


class BatchNorm2d(Cell):
    """momentum is the share that the old statistics keep, so one minus torch's."""

    dims = 4
    moving_mean: torch.Tensor
    moving_variance: torch.Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        moving_mean_init: Any = "zeros",
        moving_var_init: Any = "ones",
        use_batch_statistics: bool | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.momentum, self.use_batch_statistics = eps, momentum, use_batch_statistics
        self.gamma = Parameter(initializer(gamma_init, [num_features]), requires_grad=affine)
        self.beta = Parameter(initializer(beta_init, [num_features]), requires_grad=affine)
        self.register_buffer("moving_mean", plain(initializer(moving_mean_init, [num_features])))
        self.register_buffer("moving_variance", plain(initializer(moving_var_init, [num_features])))

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != self.dims:
            raise UsageError(
                say(
                    f"{type(self).__name__} takes tensors of {self.dims} dims, and got {tuple(x.shape)}",
                    f"{type(self).__name__} 接受 {self.dims} 维张量，而得到 {tuple(x.shape)}",
                )
            )
        uses_batch = self.training if self.use_batch_statistics is None else self.use_batch_statistics
        mean, variance = self.moving_mean, self.moving_variance
        return F.batch_norm(x, mean, variance, self.gamma, self.beta, uses_batch, 1 - self.momentum, self.eps)


class BatchNorm1d(BatchNorm2d):
    dims = 2


class LayerNorm(Cell):
    """Over the last dims, of these sizes."""

    def __init__(
        self,
        normalized_shape: Any,
        begin_norm_axis: int = -1,
        begin_params_axis: int = -1,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        epsilon: float = 1e-7,
    ) -> None:
        super().__init__()
        self.sizes = tuple(normalized_shape)
        for name, axis in (("begin_norm_axis", begin_norm_axis), ("begin_params_axis", begin_params_axis)):
            if axis != -len(self.sizes):
                raise UsageError(
                    say(
                        f"LayerNorm({name}={axis}): expected {-len(self.sizes)}, the dims of normalized_shape",
                        f"LayerNorm({name}={axis})：应为 {-len(self.sizes)}，即 normalized_shape 的各维",
                    )
                )
        self.gamma = Parameter(initializer(gamma_init, self.sizes))
        self.beta = Parameter(initializer(beta_init, self.sizes))
        self.epsilon = epsilon

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.sizes, self.gamma, self.beta, self.epsilon)


class Embedding(Cell):
    def __init__(
        self, vocab_size: int, embedding_size: int, use_one_hot: bool = False, embedding_table: Any = "normal"
    ) -> None:
        super().__init__()
        self.embedding_table = Parameter(initializer(embedding_table, [vocab_size, embedding_size]))

    def construct(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.embedding_table)


def _pair(given: Pair) -> tuple[int, int]:
    return (given, given) if isinstance(given, int) else given
