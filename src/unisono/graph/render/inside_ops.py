"""The collectives inside an op: where its rewrite computes a sum or a maximum with other ranks (see `rewrites`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from unisono.graph.program.local_op import LocalOp
from unisono.graph.program.lowering import Compute, Lowered
from unisono.graph.program.rewrites import REWRITES
from unisono.graph.rules import tensors_of

_TALKING = ("variance", "batch_norm", "cross_entropy", "nll_loss")


@dataclass(frozen=True)
class InnerCollective:
    """An all-reduce of a rank's tensor along axes of the mesh."""

    op: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int


def collectives_inside(
    compute: Compute, lowered: Lowered, rank: int
) -> tuple[list[InnerCollective], list[InnerCollective]]:
    """In the forward and in the backward of an op, heard by running its rewrite on tensors without data."""
    rewrite = next((option.local for option in compute.options if option.local in _TALKING), None)
    if rewrite is None:
        return [], []
    forward: list[InnerCollective] = []
    backward: list[InnerCollective] = []
    hearing = forward

    def reduce(tensor: torch.Tensor, op: str, axes: tuple[int, ...]) -> torch.Tensor:
        if axes:
            hearing.append(InnerCollective(op, axes, tuple(tensor.shape), tensor.nbytes))
        return tensor.detach().clone()

    specs = {name: lowered.values[name] for name in compute.inputs if name in lowered.values}
    placements = tuple(spec.placements for spec in specs.values())
    outputs = tuple(spec.placements for spec in compute.outputs)
    index = LocalOp(compute.node, lowered.mesh, lowered.mesh.coordinate(rank), placements, outputs, reduce)
    results = _run(compute, lowered, rank, lambda *args, **kwargs: REWRITES[rewrite](index, *args, **kwargs))
    hearing = backward
    tracked = [tensor for tensor in pytree.tree_leaves(results) if tensor.requires_grad]
    if tracked:
        torch.autograd.backward(tracked, [torch.empty_like(tensor) for tensor in tracked])
    return forward, backward


def _run(compute: Compute, lowered: Lowered, rank: int, rewrite: Callable[..., object]) -> object:
    values = iter(compute.inputs)

    def local(node: fx.Node) -> Any:
        if not tensors_of(node.meta.get("val")):
            return node.meta.get("val")
        spec = lowered.values[next(values)]
        shape = spec.local(lowered.mesh, rank)
        return torch.empty(shape, dtype=spec.dtype, device="meta", requires_grad=node.name in lowered.trace.tracked)

    with torch.enable_grad():
        return rewrite(*fx.map_arg(compute.node.args, local), **fx.map_arg(compute.node.kwargs, local))


def received(collective: InnerCollective, sizes: tuple[int, ...]) -> int:
    """Bytes that each of the ranks receives, when they use the best known algorithm."""
    ranks = math.prod(sizes[axis] for axis in collective.axes)
    return round(2 * collective.nbytes * (ranks - 1) / ranks)
