"""Convolution and pooling of images, with VQNet's arguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from unisono.compat.language import say
from unisono.compat.vqnet.dtype import Dtype, dtype_of
from unisono.compat.vqnet.nn.initial import Initializer, fill
from unisono.compat.vqnet.nn.module import Module
from unisono.errors import UsageError

Extent = int | Sequence[int]


def _pair(extent: Extent) -> tuple[int, int]:
    if isinstance(extent, int):
        return extent, extent
    if len(extent) != 2:
        raise UsageError(
            say(
                f"{list(extent)}: expected one number, or two for height and width",
                f"{list(extent)}：应为一个数，或高和宽两个",
            )
        )
    return extent[0], extent[1]


class Conv2D(Module, nn.Conv2d):
    def __init__(
        self,
        input_channels: int,
        output_channels: int,
        kernel_size: Extent,
        stride: Extent = (1, 1),
        padding: str | Extent = "valid",
        use_bias: bool = True,
        kernel_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        dilation_rate: Extent = (1, 1),
        group: int = 1,
        dtype: Dtype | None = None,
        name: str = "",
    ) -> None:
        nn.Conv2d.__init__(
            self,
            input_channels,
            output_channels,
            _pair(kernel_size),
            _pair(stride),
            padding if isinstance(padding, str) else _pair(padding),
            _pair(dilation_rate),
            group,
            use_bias,
            dtype=None if dtype is None else dtype_of(dtype),
        )
        self.name = name
        fill(self.weight, kernel_initializer)
        if self.bias is not None:
            fill(self.bias, bias_initializer)


def _pooling_padding(padding: str | Extent) -> tuple[int, int]:
    if isinstance(padding, str) and padding != "valid":
        raise UsageError(
            say(
                f"padding={padding!r}: expected 'valid', or how many rows and columns to add at each side",
                f"padding={padding!r}：应为 'valid'，或每边补的行数和列数",
            )
        )
    return (0, 0) if isinstance(padding, str) else _pair(padding)


class MaxPool2D(Module, nn.MaxPool2d):
    def __init__(self, kernel: Extent, stride: Extent, padding: str | Extent = "valid", name: str = "") -> None:
        nn.MaxPool2d.__init__(self, _pair(kernel), _pair(stride), _pooling_padding(padding))
        self.name = name


class AvgPool2D(Module, nn.AvgPool2d):
    def __init__(self, kernel: Extent, stride: Extent, padding: str | Extent = "valid", name: str = "") -> None:
        nn.AvgPool2d.__init__(self, _pair(kernel), _pair(stride), _pooling_padding(padding))
        self.name = name
