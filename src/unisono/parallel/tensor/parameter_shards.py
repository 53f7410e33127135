"""The shards that a rank keeps of a model's full parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.parallel.layout import Layout, Split, layout_of, set_layout

TP = ("tp",)


def packed(dim: int, lengths: Sequence[int], ranks: int) -> Split:
    """A split along a dim that holds several parts one after the other (q, k and v): each part is sharded evenly."""
    return _packed(dim, tuple(lengths), ranks)


@functools.lru_cache(maxsize=16)  # the layers of a model are alike
def _packed(dim: int, lengths: tuple[int, ...], ranks: int) -> Split:
    if len(lengths) == 1:
        return Split.even(TP, dim, lengths[0], ranks)
    held: list[list[int]] = [[] for _ in range(ranks)]
    start = 0
    for length in lengths:
        for rank, shard in enumerate(Split.even(TP, 0, length, ranks).held):
            held[rank].extend(start + index for index in shard)
        start += length
    return Split(TP, dim, tuple(tuple(indices) for indices in held))


def lengths_of(split: Split) -> list[int]:
    """How much of the dim each rank holds."""
    return [len(indices) for indices in split.held]


class ParameterSharder:
    """Shards parameters for one rank. A parameter that is used several times is sharded once, and stays one."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.made: dict[nn.Parameter, tuple[Split, nn.Parameter]] = {}

    def shard(self, full: nn.Parameter, split: Split) -> nn.Parameter:
        if full in self.made:
            before, shard = self.made[full]
            if before != split:
                raise UsageError(
                    f"a parameter of shape {tuple(full.shape)} is shared by layers whose rules shard it differently "
                    f"(along dim {before.dim} and dim {split.dim}); give them rules that agree"
                )
            return shard
        indices = torch.as_tensor(list(split.held[self.rank]), dtype=torch.long, device=full.device)
        shard = nn.Parameter(full.detach().index_select(split.dim, indices), requires_grad=full.requires_grad)
        set_layout(shard, layout_of(full).with_split(split))
        self.made[full] = (split, shard)
        return shard


def add_up(parameter: torch.Tensor, axis: str) -> None:
    """Say that ranks along `axis` each compute a part of this parameter's gradient."""
    layout = layout_of(parameter)
    if axis not in layout.summed:
        set_layout(parameter, Layout(layout.splits, (*layout.summed, axis)))
