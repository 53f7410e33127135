"""A sampler for torch's own DataLoader: each rank gets its part of every global batch.

    sampler = uni.DistributedBatchSampler(len(dataset), batch_size=64, seed=1)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader: ...

`batch_size` is global, and together the ranks take the same batches whatever their number: what one process would take.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.parallel.layout import Split
from unisono.train.order import order, require_part, require_whole_number


class DistributedBatchSampler(Sampler[list[int]]):
    """Lists of sample numbers: this rank's part of each batch. part: (index, count), by default rank and world size."""

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        part: tuple[int, int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.samples = require_whole_number("samples", samples, 1)
        self.batch_size = require_whole_number("batch_size", batch_size, 1)
        if part is None:
            part = (world.rank(), world.world_size()) if world.is_initialized() else (0, 1)
        self.part = require_part(part)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        last = samples % batch_size if not drop_last else 0
        if min(batch_size, last or batch_size) < self.part[1]:
            raise UsageError(
                f"{samples} samples in batches of {batch_size}: the smallest has {last or batch_size} for "
                f"{self.part[1]} ranks; use a larger batch_size, drop_last=True, or uni.Loader, which has no such limit"
            )

    def set_epoch(self, epoch: int) -> None:
        """Before each epoch: its order depends on the seed and on this."""
        self.epoch = require_whole_number("epoch", epoch, 0)

    def __len__(self) -> int:
        full, rest = divmod(self.samples, self.batch_size)
        return full + bool(rest and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        taken = order(self.samples, self.seed, self.epoch, self.shuffle)
        index, count = self.part
        for number in range(len(self)):
            batch = taken[number * self.batch_size : (number + 1) * self.batch_size]
            held = Split.even((), 0, len(batch), count).held[index]
            yield batch[held[0] : held[-1] + 1].tolist()
