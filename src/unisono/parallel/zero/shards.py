"""Shards: which shard of each parameter a rank owns, and how the shards of many travel in one message.

A parameter is sharded along dim 0. A message to or from all ranks has one chunk a rank, of equal size: the rank's shard
of every parameter, one after the other, and padding (MessageLayout).

    gradients   [ chunk 0 | chunk 1 | ... ]   --reduce-scatter-->   my chunk, summed
    parameters  my chunk   --all-gather-->   [ chunk 0 | chunk 1 | ... ]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.mesh.bucket import Bucket, Spare
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
        self.emulates: torch.dtype | None = None  # to which the parameter is rounded, whatever its dtype
        self.earlier: torch.Tensor | None = None  # the gradient before the backward that is under way

    def published(self) -> torch.Tensor:
        """What other ranks get of this rank's shard."""
        mine = self.optimized.detach()
        return mine if self.emulates is None else mine.to(self.emulates).to(mine.dtype)

    def of(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The shard of a rank, as a view."""
        held = self.held[rank]
        return _at_least_1d(full)[held.start : held.stop]

    def size(self, rank: int) -> int:
        return len(self.held[rank]) * self.shape[1:].numel()

    def own(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard, in the shape that the optimizer sees."""
        return _at_least_1d(full)[self.mine.start : self.mine.stop].view(self.local_shape)

    def own_of_parameter(self) -> torch.Tensor:
        """This rank's shard of the parameter as it is in the model; under ZeRO 3 that is all of it between uses."""
        values = self.parameter.detach()
        return self.own(values) if values.shape == self.shape else values

    @property
    def is_even(self) -> bool:
        """Whether the shards of all ranks are of the same size, and not empty."""
        return bool(self.shape) and len(self.mine) > 0 and len({len(held) for held in self.held}) == 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (len(self.mine), *self.shape[1:]) if self.shape else ()


class MessageLayout:
    """Where each rank's shard of each parameter is in a message that has one chunk a rank.

    Parameters of one message may have several dtypes. The message has the narrowest of them, `dtype`; an element of a
    wider parameter takes the place of several, aligned for its own dtype: an all-gather only moves bytes. Without
    `dtypes` every element of the message is one of a shard.
    """

    def __init__(self, shards: Sequence[ZeroShard], ranks: int, dtypes: Sequence[torch.dtype] | None = None) -> None:
        self._shards, self._ranks = shards, ranks
        self._dtypes: Sequence[torch.dtype | None] = dtypes or [None] * len(shards)
        self.dtype = min(dtypes, key=lambda dtype: dtype.itemsize) if dtypes else None
        widths = [1 if dtype is None or self.dtype is None else dtype.itemsize // self.dtype.itemsize
                  for dtype in self._dtypes]  # fmt: skip
        aligned = max(widths)
        self._is_dense = aligned == 1  # one shard begins where the one before ends
        self._spans: list[list[tuple[int, int]]] = []  # of each rank: where in its chunk each shard is
        self.chunk = 0  # elements
        for rank in range(ranks):
            first, spans = 0, []
            for shard, width in zip(shards, widths, strict=True):
                last = first + shard.size(rank) * width
                spans.append((first, last))
                first = -(-last // aligned) * aligned
            self._spans.append(spans)
            self.chunk = max(self.chunk, first)
        self.has_padding = any(sum(last - first for first, last in spans) < self.chunk for spans in self._spans)

    def of_all_ranks(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Of evenly sharded parameters: the shards of all ranks, as one view a parameter."""
        chunks = message.view(self._ranks, self.chunk)
        return [
            _viewed(chunks[:, first:last], dtype).unflatten(1, shard.local_shape)
            for (first, last), dtype, shard in zip(self._spans[0], self._dtypes, self._shards, strict=True)
        ]

    def of_rank(self, message: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """A rank's shards in a message, along dim 0 as many as it holds."""
        return self.of_chunk(message[rank * self.chunk : (rank + 1) * self.chunk], rank)

    def of_chunk(self, chunk: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """The same in the chunk of the rank."""
        parts = zip(self.flat(chunk, rank), self._shards, strict=True)
        return [part.view(len(shard.held[rank]), *shard.shape[1:]) for part, shard in parts]

    def flat(self, chunk: torch.Tensor, rank: int) -> Sequence[torch.Tensor]:
        """The same, each in one dim."""
        spans = self._spans[rank]
        if self._is_dense:
            sizes = [last - first for first, last in spans]
            return chunk[: sum(sizes)].split(sizes)
        return [_viewed(chunk[first:last], dtype) for (first, last), dtype in zip(spans, self._dtypes, strict=True)]


def _viewed(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or tensor.dtype == dtype else tensor.view(dtype)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target; those of the same dtypes together, as only such can take one kernel."""
    kinds: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = kinds.setdefault((target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for some, others in kinds.values():
        foreach_copy_(some, others)


class ShardBucket(Bucket):
    """Parameters whose shards travel together."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], comm: Communicator, shards: Sequence[ZeroShard]
    ) -> None:
        super().__init__(names, parameters, comm)
        self.shards = list(shards)
        self.sent: torch.Tensor | None = None  # the message that is on its way
        self.is_even = all(shard.is_even for shard in shards)
        self._gradients = MessageLayout(self.shards, comm.size)
        self.chunk = self._gradients.chunk

    @cached_property
    def _gathered(self) -> MessageLayout:
        """Of parameters, in the dtypes that they have in the model."""
        return MessageLayout(self.shards, self.comm.size, [parameter.dtype for parameter in self.parameters])

    @property
    def size(self) -> int:
        return self.comm.size * self.chunk

    def slots(self, message: torch.Tensor) -> list[list[torch.Tensor]]:
        """Where each rank's shard of each gradient is in a message, for evenly sharded parameters those of all ranks
        in one; the padding becomes zeros."""
        if self.is_even:
            return [[slot] for slot in self._gradients.of_all_ranks(message)]
        if self._gradients.has_padding:
            message.zero_()
        by_rank = [self._gradients.of_rank(message, rank) for rank in range(self.comm.size)]
        return [list(slots) for slots in zip(*by_rank, strict=True)]

    def parts(self, index: int, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.is_even:
            return [gradient.unflatten(0, (self.comm.size, -1))]
        return [self.shards[index].of(gradient, rank) for rank in range(self.comm.size)]

    def all_gather(self, locals_: Sequence[torch.Tensor], spare: Spare | None = None) -> Handle:
        """Give every rank this rank's shard of every parameter, in the parameter's dtype; the handle gives the
        message."""
        device, layout = self.parameters[0].device, self._gathered
        chunk = torch.empty(layout.chunk, dtype=layout.dtype, device=device)
        if layout.has_padding:
            chunk.zero_()
        _copy(layout.flat(chunk, self.comm.rank), [local.reshape(-1) for local in locals_])
        message = (spare or Spare()).take(self.comm.size * layout.chunk, chunk.dtype, device)
        return self.comm.all_gather_into(message, chunk, async_op=True)

    @torch.no_grad()
    def unpack(self, message: torch.Tensor, full_tensors: Sequence[torch.Tensor], has_own: bool = False) -> None:
        """Put what `all_gather` brought into full tensors; with `has_own`, which have this rank's shard already."""
        if self.is_even:  # what is there already is written once more: that costs less than to leave it out
            targets = [self.parts(index, full)[0] for index, full in enumerate(full_tensors)]
            _copy(targets, self._gathered.of_all_ranks(message))
            return
        targets, sources = [], []
        for rank in range(self.comm.size):
            if has_own and rank == self.comm.rank:
                continue
            targets += [shard.of(full, rank) for shard, full in zip(self.shards, full_tensors, strict=True)]
            sources += self._gathered.of_rank(message, rank)
        _copy(targets, sources)

    def mine_in(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """This rank's shard of every gradient, in its chunk of a message."""
        parts = self._gradients.flat(chunk, self.comm.rank)
        return [part.view(shard.local_shape) for shard, part in zip(self.shards, parts, strict=True)]
