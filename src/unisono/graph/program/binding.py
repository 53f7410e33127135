"""Binding: the functions that do a program's instructions on this rank's tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from unisono.graph.program.local_op import LocalOp, reduce_over
from unisono.graph.program.lowering import Compute, Lowered, Redistribute
from unisono.graph.program.native import native
from unisono.graph.program.redistribute import Redistributor
from unisono.graph.program.rewrites import REWRITES
from unisono.mesh.random import dropout as dropouts
from unisono.mesh.random.state import RandomState

Function = Callable[..., Any]


def bind(lowered: Lowered, random: RandomState) -> dict[str, Function]:
    """For each instruction its function. Makes the groups of the moves: every rank of the mesh calls it."""
    reduce = reduce_over(lowered.mesh)
    coordinate = lowered.mesh.coordinate()
    made: dict[str, Function] = {}
    for instruction in lowered.instructions:
        if isinstance(instruction, Redistribute):
            made[instruction.name] = Redistributor(instruction.redistribution, lowered.mesh)
            continue
        placements = tuple(lowered.values[name].placements for name in instruction.inputs if name in lowered.values)
        outputs = tuple(spec.placements for spec in instruction.outputs)
        local_op = LocalOp(instruction.node, lowered.mesh, coordinate, placements, outputs, reduce, random)
        made[instruction.name] = _function(instruction, local_op)
    return made


def _function(compute: Compute, local_op: LocalOp) -> Function:
    rewrite = next((option.local for option in compute.options if option.local is not None), None)
    if rewrite is None and _draws(compute.node):
        rewrite = _DRAWING[str(compute.node.target).rpartition(".")[0]]
    if rewrite is None:
        return native(compute.node.target)
    quick = _QUICK.get(rewrite)
    return quick(local_op) if quick is not None else partial(REWRITES[rewrite], local_op)


_DRAWING = {"aten.dropout": "dropout", "aten.scaled_dot_product_attention": "attention"} | dict.fromkeys(
    ("aten.rand", "aten.randn", "aten.rand_like", "aten.randn_like"), "random"
)


def _draws(node: fx.Node) -> bool:
    return "draw" in node.meta


# ---- rewrites that are common enough to be worth preparing -----------------------------------------------------------


def _view(local_op: LocalOp) -> Function:
    shape, name = local_op.result_shape(), str(local_op.node.target)
    reshaped = torch.Tensor.expand if "expand" in name or "broadcast" in name else torch.Tensor.reshape
    return lambda tensor, *_: reshaped(tensor, shape)


def _dropout(local_op: LocalOp) -> Function:
    p = local_op.call["p"]
    parts = local_op.parts(local_op.call.shape(), local_op.outputs[0])
    shape = local_op.result_shape()
    return lambda tensor, *_: dropouts.scaled(tensor, local_op.draw(shape, parts), p)


_QUICK: dict[str, Callable[[LocalOp], Function]] = {"view": _view, "dropout": _dropout}
