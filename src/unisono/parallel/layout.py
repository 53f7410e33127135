"""The layout of a parameter: how what this rank holds relates to the full tensor.

Every strategy that shards a parameter records it in its layout; code that needs full tensors (checkpoints, verify) or
the global norm reads it there, and needs to know no strategy. Gradients and optimizer states of the parameter's shape
are placed as the parameter is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from unisono.mesh.bucket import Axes
from unisono.mesh.mesh import Mesh
from unisono.plan.plan import REPLICAS

_MESSAGE = 2**25  # bytes of full tensors that are gathered at once


@dataclass(frozen=True)
class Split:
    """One split: along `dim`, rank r of `axes` (taken together) holds the indices held[r], in that order."""

    axes: Axes
    dim: int
    held: tuple[Sequence[int], ...]

    @classmethod
    def even(cls, axes: Axes, dim: int, length: int, ranks: int) -> Split:
        """Consecutive shards, as torch.tensor_split gives them: sizes differ by one at most."""
        bounds = _bounds(length, ranks)
        return cls(axes, dim, tuple(range(bounds[r], bounds[r + 1]) for r in range(ranks)))

    @property
    def length(self) -> int:
        """Of the dimension before the split."""
        return sum(len(part) for part in self.held)


def _bounds(length: int, ranks: int) -> list[int]:
    small, extra = divmod(length, ranks)
    bounds = [0]
    for rank in range(ranks):
        bounds.append(bounds[-1] + small + (rank < extra))
    return bounds


@dataclass(frozen=True)
class Layout:
    """The splits of a parameter, in the order they were made, and along which axes its gradients add up."""

    splits: tuple[Split, ...] = ()
    # Each rank along these computes a part of the gradient, from other samples or other tokens; the parts are summed.
    # (Ranks along any other axis compute the same gradient, or hold another shard of the parameter.)
    summed: Axes = REPLICAS

    def with_split(self, split: Split) -> Layout:
        return replace(self, splits=(*self.splits, split))

    @property
    def axes(self) -> Axes:
        """All axes along which ranks hold different shards."""
        return tuple(axis for split in self.splits for axis in split.axes)


UNSHARDED = Layout()


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a parameter or buffer; full, unless a strategy has set another."""
    return getattr(tensor, "unisono_layout", UNSHARDED)


def set_layout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Set the layout of a tensor."""
    tensor.unisono_layout = layout  # type: ignore[attr-defined]
    return tensor


def summed_axes(parameter: torch.Tensor, mesh: Mesh) -> Axes:
    """The axes along which ranks hold parts of this parameter's gradient: those of its layout that have several."""
    return tuple(axis for axis in layout_of(parameter).summed if axis in mesh.names and mesh.size(axis) > 1)


def is_summed(parameter: torch.Tensor, mesh: Mesh) -> bool:
    """Whether several ranks have a part of its gradient."""
    return parameter.requires_grad and bool(summed_axes(parameter, mesh))


def summed_parameters(
    named: Iterable[tuple[str, nn.Parameter]], mesh: Mesh
) -> Iterator[tuple[str, nn.Parameter, Axes]]:
    """Those that `is_summed`, with the axes."""
    return ((name, each, summed_axes(each, mesh)) for name, each in named if is_summed(each, mesh))


def local_of(full: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """This rank's shard of a full tensor."""
    for split in layout.splits:
        held = torch.as_tensor(split.held[mesh.index(*split.axes)], dtype=torch.long, device=full.device)
        full = full.index_select(split.dim, held)
    return full


def full_tensor_of(local: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The full tensor, from the shards of all ranks; every rank of the layout's axes calls it."""
    return full_tensors_of([local], [layout], mesh)[0]


def full_tensors_of(held: Sequence[torch.Tensor], layouts: Sequence[Layout], mesh: Mesh) -> list[torch.Tensor]:
    """The full tensors; many shards travel in one message. Ranks give the same tensors in the same order."""
    full_tensors: list[torch.Tensor] = []
    for begin, end in _bunches(
        [_full_numel(*each) * each[0].element_size() for each in zip(held, layouts, strict=True)]
    ):
        full_tensors += _gathered(held[begin:end], layouts[begin:end], mesh)
    return full_tensors


def _gathered(held: Sequence[torch.Tensor], layouts: Sequence[Layout], mesh: Mesh) -> list[torch.Tensor]:
    """The last split of each is undone first, in one message for all along the same axes; then the one before it."""
    now = [local.detach() for local in held]
    left = [list(layout.splits) for layout in layouts]
    while any(left):
        groups: dict[tuple[Axes, torch.dtype, str], list[int]] = {}
        for number, splits in enumerate(left):
            if splits:
                kind = (splits[-1].axes, now[number].dtype, now[number].device.type)
                groups.setdefault(kind, []).append(number)
        for (axes, *_), numbers in groups.items():
            merged = _merged(
                [now[number] for number in numbers], [left[number].pop() for number in numbers], axes, mesh
            )
            for number, tensor in zip(numbers, merged, strict=True):
                now[number] = tensor
    return [tensor.to(local.device) for tensor, local in zip(now, held, strict=True)]


def _merged(shards: list[torch.Tensor], splits: list[Split], axes: Axes, mesh: Mesh) -> list[torch.Tensor]:
    """The tensors before these splits, all of which are along the same axes."""
    comm = mesh.comm(*axes)
    if comm.backend == "nccl":  # offloaded state is in host memory
        shards = [shard.to(comm.device) for shard in shards]
    shapes = [
        [_with(shard.shape, s.dim, len(held)) for held in s.held] for shard, s in zip(shards, splits, strict=True)
    ]
    length = max(sum(math.prod(shape[rank]) for shape in shapes) for rank in range(comm.size))
    message = shards[0].new_zeros(length)
    torch.cat([shard.reshape(-1) for shard in shards], out=message[: sum(shard.numel() for shard in shards)])
    full_tensors = [
        shard.new_empty(_with(shard.shape, split.dim, split.length))
        for shard, split in zip(shards, splits, strict=True)
    ]
    for rank, theirs in enumerate(comm.all_gather(message)):
        begin = 0
        for full, split, shape in zip(full_tensors, splits, shapes, strict=True):
            end = begin + math.prod(shape[rank])
            indices = torch.as_tensor(split.held[rank], dtype=torch.long, device=full.device)
            full.index_copy_(split.dim, indices, theirs[begin:end].view(shape[rank]))
            begin = end
    return full_tensors


def _with(shape: Sequence[int], dim: int, length: int) -> list[int]:
    changed = list(shape)
    changed[dim] = length
    return changed


def full_numel(local: torch.Tensor) -> int:
    """Elements of the full tensor: the same number on every rank, however unevenly they share it."""
    return _full_numel(local, layout_of(local))


def _full_numel(local: torch.Tensor, layout: Layout) -> int:
    shape: Sequence[int] = local.shape
    for split in reversed(layout.splits):
        shape = _with(shape, split.dim, split.length)
    return math.prod(shape)


def _bunches(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of tensors of up to _MESSAGE bytes together. All ranks come to the same, as it goes by full sizes."""
    begin, total = 0, 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > _MESSAGE:
            yield begin, number
            begin, total = number, 0
        total += size
    if begin < len(sizes):
        yield begin, len(sizes)
