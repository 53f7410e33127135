"""Binding: the functions that do a program's instructions on this rank's tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from unisono.graph.program.local_op import LocalOp, reduce_over
from unisono.graph.program.lowering import Compute, Lowered, Redistribute
from unisono.graph.program.redistribute import Redistributor
from unisono.graph.program.rewrites import REWRITES
from unisono.mesh.random import dropout as dropouts
from unisono.mesh.random.state import RandomState
from unisono.torch_compat import NN_FUNCTIONS

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


# ---- ops that are called as they are ---------------------------------------------------------------------------------

# A traced op is an overload such as aten.linear.default. Called as such it takes several microseconds more than torch's
# own bindings of the same op, which a plain model uses; on small tensors that is as much as the op itself. These ops
# have a binding that takes the overload's arguments as they are.
_IN_TORCH = (
    "relu layer_norm embedding add.Tensor sub.Tensor mul.Tensor div.Tensor matmul mm bmm addmm transpose.int permute t "
    "reshape flatten.using_ints unsqueeze squeeze.dim select.int unbind.int cat stack "
    "mean.dim mean sum.dim_IntList sum pow.Tensor_Scalar rsqrt sqrt neg cos sin exp log tanh sigmoid softmax.int "
    "log_softmax.int conv2d.default conv1d.default batch_norm clamp where.self eq.Tensor eq.Scalar ne.Scalar lt.Scalar "
    "gt.Scalar le.Tensor ge.Scalar logical_not bitwise_and.Tensor masked_fill.Scalar tril triu clone rms_norm "
    "group_norm argmax topk cumsum rsub.Scalar abs square erf index_select gather"
)
_IN_NN = (
    "linear gelu silu scaled_dot_product_attention"  # not losses: their bindings have another default for reduction
)
_OF_TENSORS = "view.default expand contiguous"


def _table() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {}
    for names, home in ((_IN_TORCH, torch), (_IN_NN, NN_FUNCTIONS), (_OF_TENSORS, torch.Tensor)):
        for name in names.split():
            op, _, overload = name.partition(".")
            target = getattr(getattr(torch.ops.aten, op), overload or "default")
            table[target] = getattr(home, op)
    return table


_NATIVE = _table()


def native(target: Any) -> Function:
    """What to call for an op of the graph."""
    return _NATIVE.get(target, target)
