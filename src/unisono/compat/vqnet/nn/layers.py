"""Dropout, normalisation, embeddings and recurrent layers, with VQNet's arguments; each is torch's module.

Layers that take the same arguments share an `__init__`, whose `super(Module, self)` is torch's own class of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from unisono.compat.vqnet.dtype import Dtype, dtype_of
from unisono.compat.vqnet.nn.initial import Initializer, fill
from unisono.compat.vqnet.nn.module import Module


def _kind(dtype: Dtype | None) -> torch.dtype | None:
    return None if dtype is None else dtype_of(dtype)


class Dropout(Module, nn.Dropout):
    def __init__(self, dropout_rate: float = 0.5, name: str = "") -> None:
        nn.Dropout.__init__(self, dropout_rate)
        self.name = name


class _BatchNorm(Module):
    def __init__(
        self,
        channel_num: int,
        momentum: float = 0.1,
        epsilon: float = 1e-5,
        affine: bool = True,
        beta_initializer: Initializer | None = None,
        gamma_initializer: Initializer | None = None,
        dtype: Dtype | None = None,
        name: str = "",
    ) -> None:
        super(Module, self).__init__(channel_num, epsilon, momentum, affine, dtype=_kind(dtype))
        self.name = name
        if affine:
            norm: Any = self
            fill(norm.bias, beta_initializer)
            fill(norm.weight, gamma_initializer)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    pass


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    pass


class LayerNormNd(Module, nn.LayerNorm):
    """Over the last dims, of `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: Sequence[int],
        epsilon: float = 1e-5,
        affine: bool = True,
        dtype: Dtype | None = None,
        name: str = "",
    ) -> None:
        nn.LayerNorm.__init__(self, tuple(normalized_shape), epsilon, affine, dtype=_kind(dtype))
        self.name = name


class LayerNorm1d(Module, nn.LayerNorm):
    """Over the last dim, of `norm_size`."""

    def __init__(
        self, norm_size: int, epsilon: float = 1e-5, affine: bool = True, dtype: Dtype | None = None, name: str = ""
    ) -> None:
        nn.LayerNorm.__init__(self, norm_size, epsilon, affine, dtype=_kind(dtype))
        self.name = name


class GroupNorm(Module, nn.GroupNorm):
    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        epsilon: float = 1e-5,
        affine: bool = True,
        dtype: Dtype | None = None,
        name: str = "",
    ) -> None:
        nn.GroupNorm.__init__(self, num_groups, num_channels, epsilon, affine, dtype=_kind(dtype))
        self.name = name


class Embedding(Module, nn.Embedding):
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight_initializer: Initializer | None = nn.init.xavier_normal_,
        dtype: Dtype | None = None,
        name: str = "",
    ) -> None:
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, dtype=_kind(dtype))
        self.name = name
        fill(self.weight, weight_initializer)


class _Recurrent(Module):
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = True,
        use_bias: bool = True,
        bidirectional: bool = False,
        dtype: Dtype | None = None,
        name: str = "",
        **options: Any,
    ) -> None:
        options |= {"bias": use_bias, "batch_first": batch_first, "bidirectional": bidirectional}
        super(Module, self).__init__(input_size, hidden_size, num_layers, dtype=_kind(dtype), **options)
        self.name = name


class LSTM(_Recurrent, nn.LSTM):
    """layer(x, (h, c)) returns (outputs, (h, c)); samples are first unless batch_first=False."""


class GRU(_Recurrent, nn.GRU):
    pass


class RNN(_Recurrent, nn.RNN):
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        batch_first: bool = True,
        use_bias: bool = True,
        bidirectional: bool = False,
        dtype: Dtype | None = None,
        name: str = "",
    ) -> None:
        options = (batch_first, use_bias, bidirectional, dtype, name)
        super().__init__(input_size, hidden_size, num_layers, *options, nonlinearity=nonlinearity)


class Identity(Module, nn.Identity):
    def __init__(self, name: str = "") -> None:
        nn.Identity.__init__(self)
        self.name = name
