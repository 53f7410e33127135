"""The linear layer, with VQNet's arguments."""

from __future__ import annotations

from torch import nn

from unisono.compat.vqnet.dtype import Dtype, dtype_of
from unisono.compat.vqnet.nn.initial import Initializer, fill
from unisono.compat.vqnet.nn.module import Module


class Linear(Module, nn.Linear):
    def __init__(
        self,
        input_channels: int,
        output_channels: int,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        name: str = "",
    ) -> None:
        kind = None if dtype is None else dtype_of(dtype)
        nn.Linear.__init__(self, input_channels, output_channels, bias=use_bias, dtype=kind)
        self.name = name
        fill(self.weight, weight_initializer)
        if use_bias:
            fill(self.bias, bias_initializer)
