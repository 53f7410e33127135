"""Tensors placed on a mesh by hand, to compare what was moved there with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Partial, Placement, local_slice


def full_values(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def part_of(full: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's local tensor; parts of a Partial differ from rank to rank and reduce to the full tensor."""
    axes = [mesh.names[axis] for axis, placement in enumerate(placements) if isinstance(placement, Partial)]
    part = full
    if axes:
        op = next(placement.reduce_op for placement in placements if isinstance(placement, Partial))
        part = _partial(full, op, mesh.size(*axes), mesh.index(*axes)) * averaged(mesh, placements)
    return local_slice(part, mesh, placements).contiguous()


def _partial(full: torch.Tensor, op: str, count: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17)
    noise = torch.randint(1, 5, (count, *full.shape), generator=generator, dtype=torch.int64).double()
    if op in ("sum", "avg"):
        noise[-1] = -noise[:-1].sum(0)
        return noise[index] + (full if index == count - 1 else 0)
    if op == "product":
        noise = 2.0**noise
        noise[-1] = 1 / noise[:-1].prod(0)
        return noise[index] * (full if index == count - 1 else 1)
    owner = torch.arange(full.numel()).reshape(full.shape) % count
    away = noise[index] * (owner != index)
    return full + away if op == "min" else full - away


def placed_by_hand(full: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> tuple[torch.Tensor, DTensor]:
    """A local leaf and the DTensor over it."""
    local = part_of(full, mesh, placements).requires_grad_()
    placed = DTensor.from_local(
        local, mesh.device_mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    return local, placed


def averaged(mesh: Mesh, placements: Sequence[Placement]) -> int:
    """Over how many ranks a tensor is an average."""
    return math.prod(
        mesh.shape[axis]
        for axis, placement in enumerate(placements)
        if isinstance(placement, Partial) and placement.reduce_op == "avg"
    )
