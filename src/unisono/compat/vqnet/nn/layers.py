"""Dropout, normalisation, embeddings and recurrent layers, with VQNet's arguments; each is torch's module."""

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


class BatchNorm1d(Module, nn.BatchNorm1d):
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
        nn.BatchNorm1d.__init__(self, channel_num, epsilon, momentum, affine, dtype=_kind(dtype))
        _fill_norm(self, beta_initializer, gamma_initializer, name)


class BatchNorm2d(Module, nn.BatchNorm2d):
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
        nn.BatchNorm2d.__init__(self, channel_num, epsilon, momentum, affine, dtype=_kind(dtype))
        _fill_norm(self, beta_initializer, gamma_initializer, name)


def _fill_norm(norm: Any, beta: Initializer | None, gamma: Initializer | None, name: str) -> None:
    norm.name = name
    if norm.affine:
        fill(norm.bias, beta)
        fill(norm.weight, gamma)


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


class LSTM(Module, nn.LSTM):
    """layer(x, (h, c)) returns (outputs, (h, c)); samples are first unless batch_first=False."""

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
    ) -> None:
        options: dict[str, Any] = {"bias": use_bias, "batch_first": batch_first, "bidirectional": bidirectional}
        nn.LSTM.__init__(self, input_size, hidden_size, num_layers, dtype=_kind(dtype), **options)
        self.name = name


class GRU(Module, nn.GRU):
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
    ) -> None:
        options: dict[str, Any] = {"bias": use_bias, "batch_first": batch_first, "bidirectional": bidirectional}
        nn.GRU.__init__(self, input_size, hidden_size, num_layers, dtype=_kind(dtype), **options)
        self.name = name


class RNN(Module, nn.RNN):
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
        options: dict[str, Any] = {"bias": use_bias, "batch_first": batch_first, "bidirectional": bidirectional}
        nn.RNN.__init__(
            self, input_size, hidden_size, num_layers, nonlinearity=nonlinearity, dtype=_kind(dtype), **options
        )
        self.name = name


class Identity(Module, nn.Identity):
    def __init__(self, name: str = "") -> None:
        nn.Identity.__init__(self)
        self.name = name
