"""DistributedBatchSampler: each rank's part of every global batch, for torch's DataLoader.

    sampler = uni.DistributedBatchSampler(len(dataset), batch_size=64, seed=1)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader: ...

`batch_size` is global: together the ranks read the batches of one process, whatever their number. The shuffle depends
on (seed, epoch) only, and is the same on every rank, under every plan and on every version of torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch.utils.data import Sampler

from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.parallel.layout import Split
from unisono.train.data.sample_order import order


def seed_from(*identity: object) -> int:
    """A 63-bit seed; different identities give unrelated seeds."""
    digest = hashlib.blake2b("\0".join(map(str, identity)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def require_whole_number(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}; expected a whole number of at least {least}")
    return value


def require_part(part: tuple[int, int]) -> tuple[int, int]:
    """Validate (index, count): which of how many parts of every batch."""
    index, count = part
    if not 0 <= index < count:
        raise UsageError(f"part={part}: expected (index, count) with an index from 0 to count - 1")
    return index, count


class DistributedBatchSampler(Sampler[list[int]]):
    """Lists of sample indices: this rank's part of each batch.

    Args:
        samples: How many there are.
        batch_size: Of a global batch.
        part: (index, count); default: rank and world size.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the order.
        drop_last: Drop the last batch if it is smaller.
    """

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
        """Set the epoch, before iterating it: the order depends on seed and epoch."""
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
