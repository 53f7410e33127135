"""Binding: the functions that do a program's instructions on this rank's tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from unisono.graph.program.local_op import Place, talk_over
from unisono.graph.program.lowering import Compute, Lowered, Move
from unisono.graph.program.native import native
from unisono.graph.program.redistribute import Edge
from unisono.graph.program.rewrites import REWRITES
from unisono.mesh import dropout as dropouts
from unisono.mesh.random import RandomState

Function = Callable[..., Any]


def bind(lowered: Lowered, random: RandomState) -> dict[str, Function]:
    """For each instruction its function. Makes the groups that moves talk in: every rank of the mesh calls it."""
    talk = talk_over(lowered.mesh)
    coordinate = lowered.mesh.coordinate()
    made: dict[str, Function] = {}
    for instruction in lowered.instructions:
        if isinstance(instruction, Move):
            made[instruction.name] = Edge(instruction.way, lowered.mesh)
            continue
        placements = tuple(lowered.values[name].placements for name in instruction.inputs if name in lowered.values)
        outputs = tuple(laid.placements for laid in instruction.outputs)
        place = Place(instruction.node, lowered.mesh, coordinate, placements, outputs, talk, random)
        made[instruction.name] = _function(instruction, place)
    return made


def _function(compute: Compute, place: Place) -> Function:
    rewrite = next((option.local for option in compute.options if option.local is not None), None)
    if rewrite is None and _draws(compute.node):
        rewrite = _DRAWING[str(compute.node.target).rpartition(".")[0]]
    if rewrite is None:
        return native(compute.node.target)
    quick = _QUICK.get(rewrite)
    return quick(place) if quick is not None else partial(REWRITES[rewrite], place)


_DRAWING = {"aten.dropout": "dropout", "aten.scaled_dot_product_attention": "attention"} | dict.fromkeys(
    ("aten.rand", "aten.randn", "aten.rand_like", "aten.randn_like"), "random"
)


def _draws(node: fx.Node) -> bool:
    return "draw" in node.meta


# ---- rewrites that are common enough to be worth preparing -----------------------------------------------------------


def _view(place: Place) -> Function:
    shape, name = place.result_shape(), str(place.node.target)
    reshaped = torch.Tensor.expand if "expand" in name or "broadcast" in name else torch.Tensor.reshape
    return lambda tensor, *_: reshaped(tensor, shape)


def _dropout(place: Place) -> Function:
    p = place.call["p"]
    parts = place.parts(place.call.shape(), place.outputs[0])
    shape = place.result_shape()
    return lambda tensor, *_: dropouts.scaled(tensor, place.draw(shape, parts), p)


_QUICK: dict[str, Callable[[Place], Function]] = {"view": _view, "dropout": _dropout}
