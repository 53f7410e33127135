"""An op seen from one rank: what its rewrite must know of the full tensors to run on shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx

from unisono.graph.rules.call import OpCall
from unisono.mesh.global_index import Part
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements, local_box, local_shape, shard_dim
from unisono.mesh.random.draw import Draw
from unisono.mesh.random.state import RandomState


class Reduce(Protocol):
    """How ranks add up (or take the largest of) a tensor along axes of the mesh. No gradients."""

    def __call__(self, tensor: torch.Tensor, op: str, axes: tuple[int, ...]) -> torch.Tensor: ...


@dataclass(frozen=True)
class LocalOp:
    """An op seen from one rank."""

    node: fx.Node
    mesh: Mesh
    coordinate: tuple[int, ...]
    inputs: tuple[Placements, ...]  # of each tensor input, one placement an axis
    outputs: tuple[Placements, ...]
    reduce: Reduce
    random: RandomState | None = None

    @property
    def call(self) -> OpCall:
        return OpCall(self.node)

    def number(self, argument: str) -> int:
        """Which tensor input an argument is."""
        return self.call.names.index(argument)

    def result_shape(self, output: int = 0) -> tuple[int, ...]:
        """The local shape of an output."""
        return local_shape(self.call.results[output].shape, self.mesh, self.outputs[output], self.coordinate)

    def box(self, i: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The local shape of a tensor input, and where it begins in the full tensor."""
        return local_box(self.call.shape(i), self.mesh, self.inputs[i], self.coordinate)

    def result_box(self, output: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return local_box(self.call.results[output].shape, self.mesh, self.outputs[output], self.coordinate)

    def axes_sharding(self, i: int, *dims: int) -> tuple[int, ...]:
        """The axes that shard one of these dims of a tensor input."""
        return tuple(axis for axis, placement in enumerate(self.inputs[i]) if shard_dim(placement) in dims)

    def parts(self, shape: tuple[int, ...], placements: Placements) -> dict[int, Part]:
        """Which part of a full tensor this rank holds, dim by dim."""
        sizes, offsets = local_box(shape, self.mesh, placements, self.coordinate)
        return {
            dim: Part(range(offset, offset + size), full)
            for dim, (size, offset, full) in enumerate(zip(sizes, offsets, shape, strict=True))
            if size != full
        }

    def draw(self, shape: tuple[int, ...], parts: dict[int, Part]) -> Draw:
        """The random numbers of this op: those of its module's name and call number, whichever ranks hold the
        shards."""
        assert self.random is not None, f"{self.node.name} draws random numbers, but was given no RandomState"
        path, call = self.node.meta["draw"]
        return Draw((self.random.seed, self.random.step, path, call), shape, parts)


def reduce_over(mesh: Mesh) -> Reduce:
    """Through the mesh's communicators."""

    def reduce(tensor: torch.Tensor, op: str, axes: tuple[int, ...]) -> torch.Tensor:
        if not axes:
            return tensor
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        mesh.comm(*(mesh.names[axis] for axis in axes)).all_reduce(total, op)
        return total

    return reduce
