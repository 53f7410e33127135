"""Fixed partitions of a dataset: one for each rank, or for training and testing.

For training, prefer a Loader, which partitions every batch: its order does not depend on the number of ranks.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.parallel.layout import Split
from unisono.train.data.sample_order import order


def split_data(x: Any, y: Any, shuffle: bool = False, *, seed: int = 0) -> tuple[Any, Any]:
    """This rank's part of samples and labels. Parts differ by one sample at most and cover all samples, without
    overlap.

    Args:
        x: Samples: an array, a tensor or a list.
        y: Labels, as many.
        shuffle: Whether samples are in another order, the same on every rank.
        seed: Of that order.
    """
    if len(x) != len(y):
        raise UsageError(f"split_data: {len(x)} samples but {len(y)} labels; expected one label for each sample")
    ranks, rank = (world.world_size(), world.rank()) if world.is_initialized() else (1, 0)
    if len(x) < ranks:
        raise UsageError(f"split_data: {len(x)} samples for {ranks} ranks; expected at least one for each rank")
    held = Split.even((), 0, len(x), ranks).held[rank]
    mine = order(len(x), seed, 0, shuffle)[held[0] : held[-1] + 1]
    return _select(x, mine), _select(y, mine)


def _select(data: Any, positions: torch.Tensor) -> Any:
    if isinstance(data, torch.Tensor):
        return data[positions.to(data.device)]
    if isinstance(data, np.ndarray):
        return data[positions.numpy()]
    return [data[position] for position in positions.tolist()]


class Partition(Dataset[Any]):
    """A subset of a dataset."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> Any:
        return self.data[self.indices[position]]


class DataPartitioner:
    """A dataset in parts; shuffled by the seed, the same on every rank.

    train = DataPartitioner(dataset, [0.8, 0.2], seed=1).use(0)

    Args:
        data: The dataset.
        sizes: Of the parts, as fractions.
        seed: Of the order.
    """

    def __init__(self, data: Any, sizes: Sequence[float] = (0.7, 0.2, 0.1), seed: int = 1234) -> None:
        if not sizes or any(size <= 0 for size in sizes) or sum(sizes) > 1 + 1e-9:
            raise UsageError(f"DataPartitioner: sizes {list(sizes)}; expected fractions above 0 that sum to at most 1")
        self.data = data
        indices = array("q", range(len(data)))  # 8 bytes each; a list has 36
        random.Random(seed).shuffle(indices)
        # Round the ends, so that fractions that sum to 1 cover all samples.
        ends = [min(round(total * len(indices)), len(indices)) for total in accumulate(sizes)]
        self.partitions = [indices[first:last] for first, last in zip([0, *ends], ends, strict=False)]
        for number, part in enumerate(self.partitions):
            if not part:
                raise UsageError(f"DataPartitioner: part {number} ({sizes[number]:g}) of {len(data)} samples is empty")

    def use(self, partition: int) -> Partition:
        if not 0 <= partition < len(self.partitions):
            raise UsageError(f"DataPartitioner: part {partition}; expected 0 to {len(self.partitions) - 1}")
        return Partition(self.data, self.partitions[partition])
