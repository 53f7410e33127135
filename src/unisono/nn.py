"""Layers to build parallel models from by hand."""

from __future__ import annotations

from unisono.parallel.expert.expert import MoE as MoE
from unisono.parallel.pipeline.layers import LayerSpec as LayerSpec
from unisono.parallel.pipeline.layers import TiedSpec as TiedSpec
from unisono.parallel.tensor.linear import ColumnParallelLinear as ColumnParallelLinear
from unisono.parallel.tensor.linear import RowParallelLinear as RowParallelLinear
from unisono.parallel.tensor.vocabulary import VocabParallelEmbedding as VocabParallelEmbedding
from unisono.parallel.tensor.vocabulary import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "LayerSpec",
    "MoE",
    "RowParallelLinear",
    "TiedSpec",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
]
