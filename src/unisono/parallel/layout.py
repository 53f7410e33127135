"""The layout of a parameter: how what this rank holds relates to the whole tensor.

Every strategy that cuts a parameter says so in its layout; whoever needs the whole (checkpoints, verify) or the global
norm reads it there, and needs to know no strategy. Gradients and optimizer states of the parameter's shape lie as the
parameter does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from unisono.mesh.mesh import Mesh
from unisono.plan.plan import REPLICAS

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """One cut: along `dim`, rank r of `axes` (taken together) holds the indices held[r], in that order."""

    axes: Axes
    dim: int
    held: tuple[Sequence[int], ...]

    @classmethod
    def even(cls, axes: Axes, dim: int, length: int, ranks: int) -> Split:
        """Consecutive pieces, as torch.tensor_split cuts: sizes differ by one at most."""
        bounds = _bounds(length, ranks)
        return cls(axes, dim, tuple(range(bounds[r], bounds[r + 1]) for r in range(ranks)))

    @property
    def length(self) -> int:
        """Of the dimension before the cut."""
        return sum(len(part) for part in self.held)


def _bounds(length: int, ranks: int) -> list[int]:
    small, extra = divmod(length, ranks)
    bounds = [0]
    for rank in range(ranks):
        bounds.append(bounds[-1] + small + (rank < extra))
    return bounds


@dataclass(frozen=True)
class Layout:
    """The cuts of a parameter, in the order they were made, and along which axes its gradients add up."""

    splits: tuple[Split, ...] = ()
    # Each rank along these computes a part of the gradient, from other samples or other tokens; the parts are summed.
    # (Ranks along any other axis compute the same gradient, or hold another piece of the parameter.)
    summed: Axes = REPLICAS

    def cut(self, split: Split) -> Layout:
        return replace(self, splits=(*self.splits, split))

    @property
    def axes(self) -> Axes:
        """All axes along which ranks hold different pieces."""
        return tuple(axis for split in self.splits for axis in split.axes)


WHOLE = Layout()


def layout_of(tensor: torch.Tensor) -> Layout:
    """How a parameter or buffer lies; whole, unless a strategy has said otherwise."""
    return getattr(tensor, "unisono_layout", WHOLE)


def lay(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Say how a tensor lies."""
    tensor.unisono_layout = layout  # type: ignore[attr-defined]
    return tensor


def local_of(whole: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """This rank's piece of a whole tensor."""
    for split in layout.splits:
        held = torch.as_tensor(split.held[mesh.index(*split.axes)], dtype=torch.long, device=whole.device)
        whole = whole.index_select(split.dim, held)
    return whole


def whole_of(local: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The whole tensor, from the pieces of all ranks; every rank of the layout's axes calls it."""
    local, device = local.detach(), local.device
    for split in reversed(layout.splits):
        comm = mesh.comm(*split.axes)
        if comm.backend == "nccl":  # offloaded state is in host memory
            local = local.to(comm.device)
        pieces = comm.all_gather(local.contiguous(), uneven=True)
        shape = list(local.shape)
        shape[split.dim] = split.length
        whole = local.new_empty(shape)
        for held, piece in zip(split.held, pieces, strict=True):
            whole.index_copy_(split.dim, torch.as_tensor(held, dtype=torch.long, device=local.device), piece)
        local = whole
    return local.to(device)
