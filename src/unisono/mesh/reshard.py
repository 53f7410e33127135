"""Tensors on a mesh: `shard_tensor` puts one there, `reshard` changes its placement. Both give torch DTensors.

DTensor's own `redistribute` moves data through torch's functional collectives, pads and gathers more than it must on
uneven sizes, and is not recorded by the watchdog. Here every change is a route of steps (see `route`),
each of them at most one collective of the mesh's communicators.

Gradients: that of a Shard is placed as the Shard, that of a Replicate or a Partial is the same on all ranks. So the
backward of a reshard is the reshard of the gradient, from its own placement to that of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import (
    Placement,
    Placements,
    checked,
    is_partial,
    local_shape,
    local_slice,
    nested_chunk_sizes,
    shard_dim,
)
from unisono.mesh.route import RouteStep, find_route

_NEUTRAL = {"sum": 0, "product": 1}  # with others, every rank keeps the value: the average of equals, or their extreme


def shard_tensor(tensor: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> DTensor:
    """A full tensor, the same on every rank, sharded over the mesh. Each rank keeps a copy of its part: no
    communication.

    Of a parameter or another leaf it makes a new leaf (an nn.Parameter of an nn.Parameter); through any other tensor
    gradients flow back.
    """
    if isinstance(tensor, DTensor):
        raise UsageError("shard_tensor: the tensor is on a mesh already; use reshard")
    placements = checked(placements, mesh, tensor.dim())
    if not tensor.is_leaf:
        return reshard(tensor, mesh, placements)
    local = local_slice(tensor.detach(), mesh, placements).clone(memory_format=torch.contiguous_format)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            local = _assign(local, placement, mesh.coordinate()[axis])
    sharded: Any = _on_mesh(local, mesh, placements, tensor.shape)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(sharded, requires_grad=tensor.requires_grad)  # type: ignore[return-value]
    return sharded.requires_grad_(tensor.requires_grad)


def reshard(tensor: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> DTensor:
    """The same tensor with other placements, by the cheapest collectives; gradients flow back.

    A plain tensor counts as replicated on the mesh. A DTensor may come from another mesh of the same ranks.
    """
    placements = checked(placements, mesh, tensor.dim())
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh.device_mesh, [Replicate()] * mesh.ndim, run_check=False)
    source = _mesh_of(tensor, mesh)
    if source.shape == mesh.shape and (source.ranks == mesh.ranks).all():
        return _Reshard.apply(tensor, mesh, placements)
    if set(source.ranks.flat) != set(mesh.ranks.flat):
        raise UsageError(
            f"reshard from {source} to {mesh}: the two have different ranks; expected meshes of the same ranks"
        )
    full = _Reshard.apply(tensor, source, (Replicate(),) * source.ndim)
    return reshard(full.to_local(), mesh, placements)


def move(
    local: torch.Tensor, mesh: Mesh, shape: Sequence[int], source: Sequence[Placement], target: Sequence[Placement]
) -> torch.Tensor:
    """This rank's part under `target`, from its part under `source` of a tensor of that full shape. No gradients.

    May return `local` itself where nothing has to change.
    """
    shape = tuple(shape)
    source, target = checked(source, mesh, len(shape)), checked(target, mesh, len(shape))
    expected = local_shape(shape, mesh, source)
    if tuple(local.shape) != expected:
        raise UsageError(f"the local tensor is {tuple(local.shape)}; under {source} of {shape} expected {expected}")
    return Mover(mesh, shape, local.dtype.itemsize, source, target)(local)


class Mover:
    """`move`, prepared once for tensors that go the same way again and again. Checks nothing when called.

    The groups that it communicates in are made by `connect`, or by the first call: all their ranks take part.
    """

    def __init__(
        self, mesh: Mesh, shape: Sequence[int], itemsize: int, source: Sequence[Placement], target: Sequence[Placement]
    ) -> None:
        shape, source, target = tuple(shape), tuple(source), tuple(target)
        self._empty = None if math.prod(shape) else local_shape(shape, mesh, target)
        self._steps: list[tuple[Callable[[torch.Tensor, _Exchange], torch.Tensor], _Exchange]] = []
        state = list(source)
        for step in find_route(shape, itemsize, mesh.shape, source, target) if self._empty is None else ():
            if math.prod(mesh.shape[axis] for axis in step.axes) > 1:
                self._steps.append((_STEPS[step.kind], _Exchange.of(mesh, shape, state, step)))
            for axis in step.axes:
                state[axis] = step.after

    @property
    def is_idle(self) -> bool:
        """Whether it returns what it is given."""
        return not self._steps and self._empty is None

    def connect(self) -> Mover:
        """Make the groups now, where every rank of the mesh makes the same movers in the same order."""
        for _, exchange in self._steps:
            if exchange.step.communicates:
                _ = exchange.comm
        return self

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        if self._empty is not None:
            return local.new_empty(self._empty)
        for step, exchange in self._steps:
            local = step(local, exchange)
        return local


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, mesh: Mesh, target: Placements) -> DTensor:
        source = checked(tensor.placements, mesh, tensor.dim())
        ctx.mesh, ctx.source, ctx.target = mesh, source, target
        if tensor.requires_grad:
            _require_gradients((*source, *target))
        local = tensor._local_tensor
        moved = move(local, mesh, tensor.shape, source, target)
        return _on_mesh(moved.view_as(moved) if moved is local else moved, mesh, target, tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        back = tuple(Replicate() if isinstance(placement, Partial) else placement for placement in ctx.source)
        moved = reshard(grad, ctx.mesh, back)
        # The local gradient of an average over n ranks is 1/n of the gradient of what it stands for.
        factor = _averaged(ctx.target, ctx.mesh) / _averaged(ctx.source, ctx.mesh)
        return (moved if factor == 1 else moved * factor), None, None


def _averaged(placements: Placements, mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis, placement in enumerate(placements) if is_partial(placement, "avg"))


def _require_gradients(placements: Placements) -> None:
    for placement in placements:
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise UsageError(
                f"reshard of {placement} with gradients: only sums and averages have one here; detach the tensor first"
            )


def _mesh_of(tensor: DTensor, mesh: Mesh) -> Mesh:
    return mesh if tensor.device_mesh is mesh.device_mesh else Mesh.of(tensor.device_mesh)


def _on_mesh(local: torch.Tensor, mesh: Mesh, placements: Placements, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh.device_mesh, placements, run_check=False, shape=shape, stride=stride)


# ---- the steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Exchange:
    """A step seen from this rank."""

    mesh: Mesh
    step: RouteStep
    me: int  # this rank's index in the group of the step's axes
    lengths: dict[int, list[int]]  # for each dim of the step, the lengths of all members' shards in the group's order

    @classmethod
    def of(cls, mesh: Mesh, shape: tuple[int, ...], state: Sequence[Placement], step: RouteStep) -> _Exchange:
        names = [mesh.names[axis] for axis in step.axes]
        # The step splits or joins the shard that the other axes leave.
        others = [Replicate() if axis in step.axes else placement for axis, placement in enumerate(state)]
        full = local_shape(shape, mesh, others)
        counts = [mesh.shape[axis] for axis in step.axes]
        dims = [dim for placement in (step.before, step.after) if (dim := shard_dim(placement)) is not None]
        return cls(mesh, step, mesh.index(*names), {dim: nested_chunk_sizes(full[dim], counts) for dim in dims})

    @property
    def joined(self) -> int:
        """The dim whose shards the step joins."""
        dim = shard_dim(self.step.before)
        assert dim is not None
        return dim

    @property
    def sharded_dim(self) -> int:
        """The dim that the step shards."""
        dim = shard_dim(self.step.after)
        assert dim is not None
        return dim

    @property
    def op(self) -> str:
        """How the step reduces."""
        assert isinstance(self.step.before, Partial)
        return self.step.before.reduce_op

    @cached_property
    def comm(self) -> Communicator:
        return self.mesh.comm(*self.names)

    @property
    def names(self) -> list[str]:
        return [self.mesh.names[axis] for axis in self.step.axes]

    @cached_property
    def in_group(self) -> list[int]:
        """For each member in the order of the axes, its rank in the communicator."""
        ranks = self.comm.ranks
        return [ranks.index(rank) for rank in self.mesh.along(*self.names)]


def _all_reduce(local: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
    total = local.clone(memory_format=torch.contiguous_format)
    exchange.comm.all_reduce(total, exchange.op)
    return total


def _all_gather(local: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
    dim = exchange.joined
    lengths = exchange.lengths[dim]
    longest = max(lengths)
    shard = local.movedim(dim, 0)
    if len(shard) < longest:
        shard = torch.cat([shard, shard.new_zeros(longest - len(shard), *shard.shape[1:])])
    gathered = shard.new_empty(len(lengths), *shard.shape)
    exchange.comm.all_gather_into(gathered, shard.contiguous())
    shards = [gathered[rank][:length] for rank, length in zip(exchange.in_group, lengths, strict=True)]
    return torch.cat([shard.movedim(0, dim) for shard in shards], dim)


def _reduce_scatter(local: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
    dim = exchange.sharded_dim
    lengths = exchange.lengths[dim]
    longest = max(lengths)
    rows = local.movedim(dim, 0)
    padded = rows.new_zeros(len(lengths), longest, *rows.shape[1:])
    for rank, shard in zip(exchange.in_group, rows.split(lengths), strict=True):
        padded[rank][: len(shard)] = shard
    reduced = exchange.comm.reduce_scatter(padded.flatten(0, 1), exchange.op)
    return reduced[: lengths[exchange.me]].movedim(0, dim).contiguous()


def _all_to_all(local: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
    joined, sharded_dim = exchange.joined, exchange.sharded_dim
    order = exchange.in_group
    outgoing: list[torch.Tensor] = [local] * len(order)
    for rank, shard in zip(order, local.split(exchange.lengths[sharded_dim], sharded_dim), strict=True):
        outgoing[rank] = shard
    shapes: list[list[int]] = [[]] * len(order)
    for rank, length in zip(order, exchange.lengths[joined], strict=True):
        shapes[rank] = list(local.shape)
        shapes[rank][sharded_dim], shapes[rank][joined] = exchange.lengths[sharded_dim][exchange.me], length
    came = exchange.comm.all_to_all(
        torch.cat([shard.reshape(-1) for shard in outgoing]),
        [shard.numel() for shard in outgoing],
        [math.prod(shape) for shape in shapes],
    )
    shards = [flat.view(shape) for flat, shape in zip(came.split([math.prod(s) for s in shapes]), shapes, strict=True)]
    return torch.cat([shards[rank] for rank in order], joined)


def _slice(local: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
    dim = exchange.sharded_dim
    return local.split(exchange.lengths[dim], dim)[exchange.me].clone(memory_format=torch.contiguous_format)


def _pad(local: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
    dim = exchange.joined
    shape = list(local.shape)
    shape[dim] = sum(exchange.lengths[dim])
    padded = local.new_zeros(shape)
    padded.narrow(dim, sum(exchange.lengths[dim][: exchange.me]), local.shape[dim]).copy_(local)
    return padded


def _assign(local: torch.Tensor, placement: Placement, index: int) -> torch.Tensor:
    assert isinstance(placement, Partial)
    neutral = _NEUTRAL.get(placement.reduce_op)
    return local if neutral is None or index == 0 else torch.full_like(local, neutral)


_STEPS: dict[str, Callable[[torch.Tensor, _Exchange], torch.Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "pad": _pad,
    "assign": lambda local, exchange: _assign(local, exchange.step.after, exchange.me),
}
