"""ZeRO in a program: what the ranks of the data axis would hold alike, they share out.

    zero=1    the optimizer's state: parameters and gradients are full, each rank updates its slice of every parameter,
              and the slices are gathered after the update (`OptimizerShards`)
    zero=2    gradients too: a parameter is in shards, is gathered once in a step, and its gradient reduce-scattered
              (`in_shards`; between steps the parameter itself is in shards as well)
    zero=3    parameters too: what was gathered is let go of after its op, and gathered again in the backward
              (`GatherInBackward`)

Stages 2 and 3 are placements, so the collectives of a step are in the program for everybody to read. A parameter that
the ranks cannot shard evenly stays full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from unisono.errors import UsageError
from unisono.graph.placement.assignment import Assignment, divides
from unisono.graph.program.lowering import Redistribute
from unisono.graph.program.redistribute import Redistributor
from unisono.graph.program.shards import ParameterSpec, ProgramShards
from unisono.graph.rules.option import REPLICATE
from unisono.graph.rules.registry import options
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements, Shard, local_slice, shard_dim
from unisono.mesh.reshard import move

AXIS = "dp"
STAGES = (0, 1, 2, 3)


def require_stage(stage: int, mesh: Mesh) -> None:
    if stage not in STAGES:
        raise UsageError(f"zero={stage!r}; expected one of {', '.join(map(str, STAGES))}")
    if stage and AXIS not in mesh.names:
        raise UsageError(f"zero={stage} shards along the axis {AXIS}, which {mesh} does not have; name one so")


def in_shards(assignment: Assignment) -> Assignment:
    """The assignment with every parameter sharded along the data axis that was replicated there and can be sharded
    evenly."""
    trace, mesh = assignment.trace, assignment.mesh
    axis = mesh.axis(AXIS)
    changed = dict(assignment.options)
    for name in trace.parameters:
        if name in trace.packed_slices or name not in trace.tracked or changed[name][axis].outputs[0] != REPLICATE:
            continue
        shape, placements = trace.specs[name][0].shape, assignment.layout(name)
        dim = _even_dim(shape, placements, axis, mesh)
        if dim is not None:
            sharded = next(option for option in options(trace.node(name)) if option.outputs[0] == Shard(dim))
            changed[name] = (*changed[name][:axis], sharded, *changed[name][axis + 1 :])
    return replace(assignment, options=changed)


def _even_dim(shape: tuple[int, ...], placements: Placements, axis: int, mesh: Mesh) -> int | None:
    """The first dim that the ranks of an axis can shard evenly. Not one that a later axis of the mesh shards: this axis
    would come before it, and every shard would be of other indices."""
    later = {shard_dim(placement) for placement in placements[axis + 1 :]}
    for dim in range(len(shape)):
        if dim not in later and shape[dim] and divides(shape, _sharded_at(placements, axis, dim), mesh.shape):
            return dim
    return None


def _sharded_at(placements: Placements, axis: int, dim: int) -> Placements:
    return (*placements[:axis], Shard(dim), *placements[axis + 1 :])


class OptimizerShards:
    """Stage 1: the optimizer sees this rank's slice of each parameter, as a view of the parameter's own memory."""

    def __init__(self, shards: ProgramShards) -> None:
        self._shards = shards
        self._mesh = shards.mesh
        axis = self._mesh.axis(AXIS)
        along = self._mesh[AXIS]
        self._slices: dict[str, tuple[nn.Parameter, int]] = {}
        for name, held in shards.specs.items():
            parameter = shards.parameters.get(name)
            if parameter is None or len(held.parts) > 1 or held.placements[axis] != REPLICATE:
                continue
            dim = _even_dim(held.shape, held.placements, axis, self._mesh)
            if dim is None:
                continue
            part = nn.Parameter(local_slice(parameter.data, along, [Shard(dim)]), parameter.requires_grad)
            self._slices[name] = part, dim
            spec = replace(held.parts[0], placements=_sharded_at(held.placements, axis, dim))
            shards.optimized[name] = part
            shards.optimized_specs[name] = ParameterSpec((spec,))

    def take_gradients(self) -> None:
        along = self._mesh[AXIS]
        for name, (part, dim) in self._slices.items():
            gradient = self._shards.parameters[name].grad
            part.grad = None if gradient is None else local_slice(gradient, along, [Shard(dim)])

    @torch.no_grad()
    def publish(self) -> None:
        """Gather what every rank has updated. All ranks call it."""
        for name, (part, _) in self._slices.items():
            before, after = self._shards.optimized_specs[name], self._shards.specs[name]
            local = part.detach().contiguous()
            full = move(local, self._mesh, after.shape, before.placements, after.placements)
            self._shards.parameters[name].copy_(full)
            part.grad = None


class GatherInBackward(torch.autograd.graph.saved_tensors_hooks):
    """Stage 3: while it is entered, autograd keeps a gathered parameter's shard instead of the full one, and the
    backward gathers it again."""

    def __init__(self) -> None:
        self._gathered: dict[int, tuple[StorageWeakRef, Redistributor, torch.Tensor]] = {}
        super().__init__(self._pack, self._unpack)

    def watched(self, instruction: Redistribute, edge: Redistributor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The edge of a parameter, with what it gathers noted."""

        def gather(local: torch.Tensor) -> torch.Tensor:
            full = edge(local)
            storage = full.untyped_storage()
            if storage.data_ptr() != local.untyped_storage().data_ptr() and torch.is_grad_enabled():
                # The weak reference keeps the storage's identity from being given to another while it is noted.
                self._gathered[storage._cdata] = StorageWeakRef(storage), edge, local.detach()
            return full

        return gather

    def forget(self) -> None:
        self._gathered.clear()

    def _pack(self, tensor: torch.Tensor) -> Any:
        noted = self._gathered.get(tensor.untyped_storage()._cdata)
        if noted is None:
            return tensor
        return noted[1], noted[2], tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        edge, local, shape, stride, offset = packed
        with torch.no_grad():
            return edge.forward(local).as_strided(shape, stride, offset)
