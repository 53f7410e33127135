"""Shards: which shard of each parameter a rank owns, and how the shards of many travel in one message.

A parameter is sharded along dim 0. A message to or from all ranks has one chunk a rank, of equal size: the rank's shard
of every parameter, one after the other, and padding.

    gradients   [ chunk 0 | chunk 1 | ... ]   --reduce-scatter-->   my chunk, summed
    parameters  my chunk   --all-gather-->   [ chunk 0 | chunk 1 | ... ]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.parallel.data.bucket import Bucket, Spare
from unisono.parallel.layout import Axes, Layout, Split, layout_of
from unisono.torch_compat import foreach_copy_

Held = tuple[range, ...]  # the indices along dim 0 of each rank


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a dim 0, which a number has not."""
    return tensor if tensor.ndim else tensor.view(1)


def assigned_evenly(shape: torch.Size, load: list[int]) -> Held:
    """Every rank gets about as many indices of dim 0; ranks with the least load so far get one more of a remainder."""
    ranks = len(load)
    if not shape:
        return (range(1),) * ranks  # a single number is not worth sharding: all own it
    small, extra = divmod(shape[0], ranks)
    favoured = set(sorted(range(ranks), key=lambda rank: load[rank])[:extra])
    held, first = [], 0
    for rank in range(ranks):
        last = first + small + (rank in favoured)
        held.append(range(first, last))
        load[rank] += (last - first) * shape[1:].numel()
        first = last
    return tuple(held)


def assigned_in_full(shape: torch.Size, load: list[int]) -> Held:
    """The rank with the least load so far gets it in full: for optimizers that need full parameters."""
    if not shape:
        return (range(1),) * len(load)
    owner = load.index(min(load))
    load[owner] += shape.numel()
    return tuple(range(shape[0]) if rank == owner else range(0) for rank in range(len(load)))


class ZeroShard:
    """One parameter, and the shard of it that each rank of its group owns."""

    def __init__(self, name: str, parameter: nn.Parameter, held: Held, axes: Axes, rank: int) -> None:
        self.name = name
        self.parameter = parameter
        self.held = held
        self.mine = held[rank]
        self.shape = parameter.shape
        layout = layout_of(parameter)
        self.full_layout = layout
        self.layout: Layout = layout.with_split(Split(axes, 0, held)) if self.shape else layout
        self.optimized = parameter  # what the optimizer sees: this rank's shard, perhaps in another precision
        self.earlier: torch.Tensor | None = None  # the gradient before the backward that is under way

    def of(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of a rank, as a view."""
        held = self.held[rank]
        return _at_least_1d(full)[held.start : held.stop]

    def size(self, rank: int) -> int:
        return len(self.held[rank]) * self.shape[1:].numel()

    def own(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard, in the shape that the optimizer sees."""
        return _at_least_1d(full)[self.mine.start : self.mine.stop].view(self.local_shape)

    @property
    def is_even(self) -> bool:
        """Whether the shards of all ranks are of the same size, and not empty."""
        return bool(self.shape) and len(self.mine) > 0 and len({len(held) for held in self.held}) == 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (len(self.mine), *self.shape[1:]) if self.shape else ()


class ShardBucket(Bucket):
    """Parameters whose shards travel together."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], comm: Communicator, shards: Sequence[ZeroShard]
    ) -> None:
        super().__init__(names, parameters, comm)
        self.shards = list(shards)
        self.sent: torch.Tensor | None = None  # the message that is on its way
        self.chunk = max(sum(shard.size(rank) for shard in shards) for rank in range(comm.size))
        self.is_even = all(shard.is_even for shard in shards)

    @property
    def size(self) -> int:
        return self.comm.size * self.chunk

    def slots(self, message: torch.Tensor) -> list[list[torch.Tensor]]:
        """Where each rank's shard of each parameter is in a message, for evenly sharded parameters those of all ranks
        in one; the padding becomes zeros."""
        ranks = self.comm.size
        if self.is_even:
            first, found = 0, []
            for shard in self.shards:
                last = first + shard.size(0)
                shards = message.view(ranks, self.chunk)[:, first:last]
                found.append([shards.unflatten(1, shard.local_shape)])
                first = last
            return found
        by_rank = []
        for rank in range(ranks):
            message[rank * self.chunk + self._used(rank) : (rank + 1) * self.chunk].zero_()
            by_rank.append(self._shards_in(message, rank))
        return [list(slots) for slots in zip(*by_rank, strict=True)]

    def parts(self, index: int, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.is_even:
            return [gradient.unflatten(0, (self.comm.size, -1))]
        return [self.shards[index].of(gradient, rank) for rank in range(self.comm.size)]

    def all_gather(self, locals_: Sequence[torch.Tensor], dtype: torch.dtype, spare: Spare | None = None) -> Handle:
        """Give every rank this rank's shard of every parameter; the handle gives the message."""
        device = self.parameters[0].device
        chunk = torch.empty(self.chunk, dtype=dtype, device=device)
        used = self._used(self.comm.rank)
        chunk[used:].zero_()
        slots = chunk[:used].split([local.numel() for local in locals_])
        foreach_copy_(list(slots), [local.reshape(-1) for local in locals_])
        message = (spare or Spare()).take(self.size, dtype, device)
        return self.comm.all_gather_into(message, chunk, async_op=True)

    @torch.no_grad()
    def unpack(self, message: torch.Tensor, full_tensors: Sequence[torch.Tensor], has_own: bool = False) -> None:
        """Put what `all_gather` brought into full tensors; with `has_own`, which have this rank's shard already."""
        if self.is_even:  # what is there already is written once more: that costs less than to leave it out
            sources = [slots[0] for slots in self.slots(message)]
            foreach_copy_([self.parts(index, full)[0] for index, full in enumerate(full_tensors)], sources)
            return
        targets, sources = [], []
        for rank in range(self.comm.size):
            if has_own and rank == self.comm.rank:
                continue
            for shard, slot, full in zip(self.shards, self._shards_in(message, rank), full_tensors, strict=True):
                targets.append(shard.of(full, rank))
                sources.append(slot)
        foreach_copy_(targets, sources)

    def mine_in(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """This rank's shard of every parameter, in its chunk."""
        sizes = [shard.size(self.comm.rank) for shard in self.shards]
        parts = chunk[: sum(sizes)].split(sizes)
        return [part.view(shard.local_shape) for shard, part in zip(self.shards, parts, strict=True)]

    def _used(self, rank: int) -> int:
        """The elements of a rank's chunk that are used; the rest is padding."""
        return sum(shard.size(rank) for shard in self.shards)

    def _shards_in(self, message: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Where a rank's shards are in a message, in their shapes."""
        first = rank * self.chunk
        slots = []
        for shard in self.shards:
            last = first + shard.size(rank)
            slots.append(message[first:last].view(len(shard.held[rank]), *shard.shape[1:]))
            first = last
        return slots
