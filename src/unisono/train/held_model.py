"""A task's model as one rank holds it under a plan, without memory: for code that looks at parameters and modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.graph.lowering import Lowered
from unisono.graph.trace import Trace
from unisono.mesh.placement import shard_dim
from unisono.parallel.layout import Layout, Split, lay
from unisono.parallel.task import Task
from unisono.plan.plan import REPLICAS, Plan
from unisono.simulate.sketch import without_memory

_CUTTING = ("ep", "tp")  # axes whose ranks have pieces of parameters


def held_model(task: Task, parts: Sequence[Lowered], rank: int) -> nn.Module:
    """The model with the parameters that the programs of this rank's stages use, cut as they are."""
    model = without_memory(task)
    held = held_parameters(model, parts, rank)
    pieces = {id(model.get_parameter(name)): piece for name, piece in held.items()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else pieces.get(id(parameter))
    return model


def held_parameters(model: nn.Module, parts: Sequence[Lowered], rank: int) -> dict[str, nn.Parameter]:
    """By name, in the model's order: the pieces that this rank's stages have, without memory, their layouts on them."""
    pieces = {id(model.get_parameter(name)): piece for name, piece in _pieces(parts, rank).items()}
    held = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in pieces:
            held[name] = pieces[id(parameter)]
            held[name].requires_grad_(parameter.requires_grad)
    return held


def require_used(trace: Trace, plan: Plan) -> None:
    """A stage of a pipeline holds what its ops use. What no op uses is on some stage too, whose size it counts for."""
    for node, name in trace.parameters.items():
        if not trace.node(node).users:
            raise UsageError(
                f"plan {plan}: {name} is used by no op of the forward, so a program does not show which stage holds "
                "it; remove it, or use --plan without pp"
            )


def _pieces(parts: Sequence[Lowered], rank: int) -> dict[str, nn.Parameter]:
    made: dict[str, nn.Parameter] = {}
    for part in parts:
        placeholders: dict[str, list[str]] = {}
        for node in part.given:
            if node in part.trace.parameters:
                placeholders.setdefault(part.trace.parameters[node], []).append(node)
        for name, nodes in placeholders.items():
            first = part.given[nodes[0]]
            summed = part.summed.get(nodes[0], ())
            layout = Layout(summed=(*REPLICAS, *(axis for axis in summed if axis not in REPLICAS)))
            for axis, placement in zip(part.mesh.names, first.placements, strict=True):
                if axis in _CUTTING and (dim := shard_dim(placement)) is not None:
                    length = sum(part.given[node].shape[dim] for node in nodes) if len(nodes) > 1 else first.shape[dim]
                    layout = Layout(layout.splits, tuple(each for each in layout.summed if each != axis))
                    layout = layout.cut(Split.even((axis,), dim, length, part.mesh.size(axis)))
            shape = local_shape_of(part, nodes, rank)
            made[name] = _piece(shape, first.dtype, layout)
    return made


def local_shape_of(part: Lowered, nodes: Sequence[str], rank: int) -> tuple[int, ...]:
    """Of a parameter, which may have a placeholder for each of the parts that it packs."""
    shapes = [part.given[node].local(part.mesh, rank) for node in nodes]
    if len(nodes) == 1:
        return shapes[0]
    dim = part.trace.pieces[nodes[0]].dim
    return tuple(sum(each[d] for each in shapes) if d == dim else size for d, size in enumerate(shapes[0]))


def _piece(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> nn.Parameter:
    made = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    lay(made, layout)
    return made
