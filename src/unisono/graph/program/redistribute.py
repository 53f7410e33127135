"""An edge: a tensor on its way from the op that made it to ops that want it in another placement.

Forward it moves this rank's part by the cheapest route (mesh/route.py); backward it moves the gradient. How gradients
lie, axis by axis of the mesh:

    the tensor is            its gradient is
    Shard(d)                 Shard(d)
    Partial                  Replicate: every rank's summand has the gradient of the sum
    Replicate, for an op     Partial(sum): each rank has computed what its part of the op contributes
      that is split there
    Replicate, for an op     Replicate: every rank has computed all of it
      that is not

So an edge may have nothing to do forward and a sum to do backward: Megatron's f, before a column-parallel layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements, is_partial
from unisono.mesh.reshard import Mover
from unisono.mesh.route import RouteStep, find_route


@dataclass(frozen=True)
class Redistribution:
    """How an edge leads: the tensor's full shape, from where to where, and the same for its gradient.

    `gradient_after` is what the consumers give back, `gradient_before` what the producer is to get; None where no
    gradient flows. Ranks along axes on which nothing changes, where they all have the
    same, may share the work.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    before: Placements
    after: Placements
    gradient_after: Placements | None = None
    gradient_before: Placements | None = None

    @property
    def is_idle(self) -> bool:
        return self.before == self.after and self.gradient_after == self.gradient_before

    def forward_steps(self, mesh: Mesh) -> tuple[RouteStep, ...]:
        return _steps(self, mesh, self.before, self.after)

    def backward_steps(self, mesh: Mesh) -> tuple[RouteStep, ...]:
        if self.gradient_after is None or self.gradient_before is None:
            return ()
        return _steps(self, mesh, self.gradient_after, self.gradient_before)


def _steps(redistribution: Redistribution, mesh: Mesh, source: Placements, target: Placements) -> tuple[RouteStep, ...]:
    if not math.prod(redistribution.shape):
        return ()
    shape, sizes = redistribution.shape, mesh.shape
    found = find_route(shape, redistribution.dtype.itemsize, sizes, source, target)
    return tuple(step for step in found if math.prod(mesh.shape[axis] for axis in step.axes) > 1)


class Redistributor:
    """A way, made ready for this rank: a function of local tensors that autograd sees through."""

    def __init__(self, redistribution: Redistribution, mesh: Mesh) -> None:
        self.redistribution = redistribution
        self.mesh = mesh
        self.forward = Mover(
            mesh, redistribution.shape, redistribution.dtype.itemsize, redistribution.before, redistribution.after
        ).connect()
        # The local gradient of an average over n ranks is 1/n of the gradient of what it stands for.
        self.factor = _averaged(redistribution.after, mesh) / _averaged(redistribution.before, mesh)
        if redistribution.gradient_before is not None:
            _ = self.backward

    @cached_property
    def backward(self) -> Mover:
        redistribution = self.redistribution
        assert redistribution.gradient_after is not None
        assert redistribution.gradient_before is not None
        mover = Mover(
            self.mesh,
            redistribution.shape,
            redistribution.dtype.itemsize,
            redistribution.gradient_after,
            redistribution.gradient_before,
        )
        return mover.connect()

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        if local.requires_grad and torch.is_grad_enabled():
            return _Redistributed.apply(local, self)
        return self.forward(local)


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, edge: Redistributor) -> torch.Tensor:
        ctx.edge = edge
        moved = edge.forward(local)
        return moved.view_as(moved) if moved is local else moved

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        edge: Redistributor = ctx.edge
        moved = edge.backward(gradient)
        return (moved if edge.factor == 1 else moved * edge.factor), None


def _averaged(placements: Placements, mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis, placement in enumerate(placements) if is_partial(placement, "avg"))
