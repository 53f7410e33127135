"""From what a rank reads to the global batch, by dataset_strategy.

"data_parallel"     a rank's batch is its part of the global one, which is all of them, rank after rank
"full_batch"        every rank reads the global batch
((8, 1), (8, 1))    for each column, the number of shards along each dim; a rank has the one of its number
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.compat.language import say
from unisono.errors import UsageError

Counts = tuple[int, ...]


def shard_counts(strategy: Any, shapes: Sequence[Counts], names: Sequence[str], ranks: int) -> list[Counts]:
    """For each column, into how many shards the ranks' batches cut the global one, along each dim."""
    if strategy == "full_batch" or ranks == 1:
        return [(1,) * len(shape) for shape in shapes]
    if strategy == "data_parallel":
        for name, shape in zip(names, shapes, strict=True):
            if not shape:
                raise UsageError(
                    say(
                        f"column {name!r} has no dims, so ranks cannot share it; batch the dataset",
                        f"列 {name!r} 没有维，各进程无法分担；请先对数据集做 batch",
                    )
                )
        return [(ranks, *(1,) * (len(shape) - 1)) for shape in shapes]
    if len(strategy) != len(shapes):
        raise UsageError(
            say(
                f"dataset_strategy={strategy!r} is for {len(strategy)} columns, but the dataset has "
                f"{len(shapes)} ({', '.join(names)}); MindSpore refuses it too: give one a column",
                f"dataset_strategy={strategy!r} 有 {len(strategy)} 列，而数据集有 {len(shapes)} 列（"
                f"{', '.join(names)}）；MindSpore 同样会报错：请为每一列各给一个",
            )
        )
    counts = [tuple(each) for each in strategy]
    for each, name, shape in zip(counts, names, shapes, strict=True):
        if len(each) != len(shape):
            raise UsageError(
                say(
                    f"dataset_strategy={strategy!r}: {each} has {len(each)} numbers, but column {name!r} has "
                    f"shape {shape}",
                    f"dataset_strategy={strategy!r}：{each} 有 {len(each)} 个数，而列 {name!r} 的形状为 {shape}",
                )
            )
        if math.prod(each) not in (1, ranks):
            raise UsageError(
                say(
                    f"dataset_strategy={strategy!r}: {each} makes {math.prod(each)} shards, but {ranks} ranks "
                    "are running; MindSpore would give several ranks the same shard, which here is for 1 "
                    f"shard (every rank has all) or {ranks}",
                    f"dataset_strategy={strategy!r}：{each} 切成 {math.prod(each)} 份，而有 {ranks} 个进程；"
                    f"MindSpore 会让几个进程得到同一份，这里只能是 1 份（每个进程都有全部）或 {ranks} 份",
                )
            )
    return counts


def global_shape(shape: Counts, counts: Counts) -> Counts:
    return tuple(size * count for size, count in zip(shape, counts, strict=True))


def gathered(tensor: torch.Tensor, counts: Counts, comm: Communicator) -> torch.Tensor:
    """The global tensor of every rank's shard."""
    if math.prod(counts) == 1:
        return tensor
    shards = comm.all_gather(tensor.contiguous())
    for dim in reversed(range(len(counts))):
        count = counts[dim]
        shards = [torch.cat(list(shards[i : i + count]), dim) for i in range(0, len(shards), count)]
    return shards[0]
