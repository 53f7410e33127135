"""What ranks say inside an op: where its rewrite finds a sum or a maximum together with others (see `rewrites`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from unisono.graph.program.local_op import Place
from unisono.graph.program.lowering import Compute, Lowered
from unisono.graph.program.rewrites import REWRITES
from unisono.graph.rules import tensors_of

_TALKING = ("variance", "batch_norm", "cross_entropy", "nll_loss")


@dataclass(frozen=True)
class Said:
    """An all-reduce of a rank's tensor along axes of the mesh."""

    op: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int


def said_inside(compute: Compute, lowered: Lowered, rank: int) -> tuple[list[Said], list[Said]]:
    """In the forward and in the backward of an op, heard by running its rewrite on tensors without data."""
    rewrite = next((option.local for option in compute.options if option.local in _TALKING), None)
    if rewrite is None:
        return [], []
    forward: list[Said] = []
    backward: list[Said] = []
    hearing = forward

    def talk(tensor: torch.Tensor, op: str, axes: tuple[int, ...]) -> torch.Tensor:
        if axes:
            hearing.append(Said(op, axes, tuple(tensor.shape), tensor.nbytes))
        return tensor.detach().clone()

    pieces = {name: lowered.values[name] for name in compute.inputs if name in lowered.values}
    placements = tuple(laid.placements for laid in pieces.values())
    outputs = tuple(laid.placements for laid in compute.outputs)
    place = Place(compute.node, lowered.mesh, lowered.mesh.coordinate(rank), placements, outputs, talk)
    results = _run(compute, lowered, rank, lambda *args, **kwargs: REWRITES[rewrite](place, *args, **kwargs))
    hearing = backward
    tracked = [tensor for tensor in pytree.tree_leaves(results) if tensor.requires_grad]
    if tracked:
        torch.autograd.backward(tracked, [torch.empty_like(tensor) for tensor in tracked])
    return forward, backward


def _run(compute: Compute, lowered: Lowered, rank: int, rewrite: Callable[..., object]) -> object:
    values = iter(compute.inputs)

    def piece(node: fx.Node) -> Any:
        if not tensors_of(node.meta.get("val")):
            return node.meta.get("val")
        laid = lowered.values[next(values)]
        shape = laid.local(lowered.mesh, rank)
        return torch.empty(shape, dtype=laid.dtype, device="meta", requires_grad=node.name in lowered.trace.tracked)

    with torch.enable_grad():
        return rewrite(*fx.map_arg(compute.node.args, piece), **fx.map_arg(compute.node.kwargs, piece))


def received(said: Said, sizes: tuple[int, ...]) -> int:
    """Bytes that each of the ranks receives, when they use the best known algorithm."""
    ranks = math.prod(sizes[axis] for axis in said.axes)
    return round(2 * said.nbytes * (ranks - 1) / ranks)
