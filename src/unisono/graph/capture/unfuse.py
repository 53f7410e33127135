"""Unpacks fused projections: one product whose result is split into parts becomes a product a part.

GPT-2's c_attn gives queries, keys and values side by side, Mixtral's gate_up_proj gates and values. Cut into runs of
columns, such a weight would give some ranks the queries and others the keys. With a placeholder for each part, each is
sharded by itself, which is how such layers are sharded by hand.

What is recognised: a weight that only this product uses (seen through transposes and casts), whose product is split
along its last dim, or viewed as (..., parts, rest) and unbound along `parts`, or taken apart by its indices, with
permutations between, as in nn.MultiheadAttention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from unisono.graph.rules.call import OpCall, Shape

aten = torch.ops.aten
_FEATURES: dict[Any, tuple[str, int, str]] = {  # the weight's argument, its dim of features, the bias' argument
    aten.linear.default: ("weight", 0, "bias"),
    aten.addmm.default: ("mat2", 1, "self"),
    aten.mm.default: ("mat2", 1, ""),
    aten.matmul.default: ("other", -1, ""),
}
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int)
_ORDERS = (aten.permute.default, aten.transpose.int)
_COPIES = (aten.contiguous.default, aten.clone.default)
_MOVES = (*_ORDERS, *_COPIES, aten.unsqueeze.default, aten.squeeze.dim)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


@dataclass(frozen=True)
class PackedSlice:
    """The part of a parameter that a placeholder stands for: parameter.narrow(dim, start, length)."""

    parameter: str
    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class _Packed:
    """A product to unpack. rest(k, made) leads the product of its k-th part to those that use that part."""

    product: fx.Node
    weight: fx.Node
    chain: list[fx.Node]  # from the weight's placeholder to the product
    dim: int  # of the weight
    bias: fx.Node | None
    lengths: list[int]
    rest: Callable[[int, fx.Node], None]


def unpack(graph: fx.Graph, parameters: dict[str, str]) -> tuple[dict[str, str], dict[str, PackedSlice]]:
    """Changes the graph; the parameters by placeholder as they are then, and which placeholders are parts of one."""
    names = dict(parameters)
    packed_slices: dict[str, PackedSlice] = {}
    for node in list(graph.nodes):
        packed = _recognised(node, names)
        if packed is None:
            continue
        start = 0
        for k, length in enumerate(packed.lengths):
            weight = _packed_slice(graph, packed.weight, packed.dim, start, length, k, names, packed_slices)
            bias = (
                None
                if packed.bias is None
                else _packed_slice(graph, packed.bias, 0, start, length, k, names, packed_slices)
            )
            packed.rest(k, _product(graph, packed, weight, bias, length))
            start += length
        for gone in (packed.weight, packed.bias):
            if gone is not None:
                del names[gone.name]
    _sweep(graph, set(parameters) - set(names))
    order = [node.name for node in graph.nodes if node.op == "placeholder"]
    return {name: names[name] for name in order if name in names}, packed_slices


def _sweep(graph: fx.Graph, unpacked: set[str]) -> None:
    afterwards = {node.meta["changed_to"] for node in graph.nodes if "changed_to" in node.meta}  # of buffers
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in afterwards and (node.op == "call_function" or node.name in unpacked):
            graph.erase_node(node)
    graph.lint()


# ---- recognising ------------------------------------------------------------------------------------------------


def _recognised(node: fx.Node, parameters: dict[str, str]) -> _Packed | None:
    found = _FEATURES.get(node.target) or (("weight", -1, "") if "grouped_mm" in str(node.target) else None)
    if node.op != "call_function" or found is None or len(node.users) != 1:
        return None
    call = OpCall(node)
    name, features, bias_name = found
    operand = call.tensors[1] if name not in call.names else call.tensors[call.names.index(name)]
    dim, chain, weight = _origin(operand, features % len(call.shape(operand)))
    bias = call.tensors[call.names.index(bias_name)] if bias_name in call.names else None
    if weight.name not in parameters or len(weight.users) != 1:
        return None
    if bias is not None and (bias.name not in parameters or len(bias.users) != 1 or len(call.shape(bias)) != 1):
        return None
    ending = _ending(node)
    return None if ending is None else _Packed(node, weight, chain, dim, bias, *ending)


def _origin(node: fx.Node, dim: int) -> tuple[int, list[fx.Node], fx.Node]:
    """Back from an operand to its placeholder: where its dim was there, and what is between."""
    chain: list[fx.Node] = []
    while node.op == "call_function" and len(node.users) == 1:
        ndim = node.meta["val"].dim()
        if node.target in (aten.transpose.int, aten.t.default):
            first, second = (int(a) % ndim for a in (node.args[1:] or (0, 1)))  # type: ignore[arg-type]
            dim = {first: second, second: first}.get(dim, dim)
        elif node.target is not aten.to.dtype:
            break
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return dim, chain, node


def _ending(product: fx.Node) -> tuple[list[int], Callable[[int, fx.Node], None]] | None:
    """Forward from a product to where it comes apart: the parts' lengths, and what replaces it by a new part."""
    chain: list[fx.Node] = []
    node = product
    parts: int | None = None  # the dim that counts parts, once a view has made it
    while len(node.users) == 1:
        node = next(iter(node.users))
        shape = tuple(node.meta["val"].shape) if isinstance(node.meta.get("val"), torch.Tensor) else ()
        before = tuple(node.args[0].meta["val"].shape) if isinstance(node.args[0], fx.Node) else ()
        if node.target in _SPLITS and parts is None and OpCall(node).dim("dim") == len(before) - 1:
            return [t.shape[-1] for t in node.meta["val"]], partial(_replace_part, node, chain, None)
        if node.target is aten.unbind.int and parts is not None and OpCall(node).dim("dim") == parts:
            count = before[parts]
            length = product.meta["val"].shape[-1] // count
            return [length] * count, partial(_replace_part, node, chain, count)
        if node.target in _VIEWS:
            split = _splits_last(before, shape)
            if parts is not None or (split is None and shape[-1:] != before[-1:]):
                return None
            parts = split
        elif node.target in _MOVES and parts is not None:
            parts = _parts_after(node, parts)
            if parts is None:
                return None
        else:
            return None
        chain.append(node)
    if parts is not None and all(_takes_one(user, parts) for user in node.users):
        count = node.meta["val"].shape[parts]
        return [product.meta["val"].shape[-1] // count] * count, partial(_replace_part, node, chain, count)
    return None


def _takes_one(node: fx.Node, parts: int) -> bool:
    return node.target is aten.select.int and OpCall(node).dim("dim") == parts and int(node.args[2]) >= 0  # type: ignore[arg-type]


def _parts_after(move: fx.Node, parts: int) -> int | None:
    """Where the dim that counts parts is after a move of dims; None where it is gone."""
    if move.target in _ORDERS:
        return _order(move).index(parts)
    if move.target in _COPIES:
        return parts
    dim = _dim(move)
    if move.target is aten.unsqueeze.default:
        return parts + (dim <= parts)
    return None if dim == parts else parts - (dim < parts)


def _order(move: fx.Node) -> list[int]:
    ndim = move.meta["val"].dim()
    if move.target is aten.permute.default:
        return [int(dim) % ndim for dim in move.args[1]]  # type: ignore[union-attr, arg-type]
    order = list(range(ndim))
    first, second = (int(dim) % ndim for dim in move.args[1:])  # type: ignore[arg-type]
    order[first], order[second] = second, first
    return order


def _dim(move: fx.Node) -> int:
    """Of an unsqueeze or a squeeze: in the longer of both shapes."""
    ndim = move.meta["val"].dim() + (move.target is aten.squeeze.dim)
    return int(move.args[1]) % ndim  # type: ignore[arg-type]


def _splits_last(before: Shape, after: Shape) -> int | None:
    """Where a view that leaves all but the last dim alone puts the first factor of the last."""
    at = len(before) - 1
    return at if len(after) > len(before) and after[:at] == before[:at] else None


# ---- rewriting --------------------------------------------------------------------------------------------------


def _packed_slice(
    graph: fx.Graph,
    full: fx.Node,
    dim: int,
    start: int,
    length: int,
    k: int,
    names: dict[str, str],
    packed_slices: dict[str, PackedSlice],
) -> fx.Node:
    with graph.inserting_before(full):
        made = graph.placeholder(f"{full.name}_part{k}")
    made.meta = dict(full.meta)
    made.meta["val"] = _narrowed(full.meta["val"], dim, length)
    names[made.name] = names[full.name]
    packed_slices[made.name] = PackedSlice(names[full.name], dim, start, length)
    return made


def _narrowed(value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    shape = list(value.shape)
    shape[dim] = length
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _copied(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
    made = graph.call_function(node.target, args, dict(node.kwargs))  # type: ignore[arg-type]
    made.meta = dict(node.meta)
    made.meta["val"] = value
    return made


def _product(graph: fx.Graph, packed: _Packed, weight: fx.Node, bias: fx.Node | None, length: int) -> fx.Node:
    product, dim = packed.product, packed.dim
    with graph.inserting_before(product):
        for link in packed.chain:
            value = link.target(weight.meta["val"], *link.args[1:], **link.kwargs)  # type: ignore[operator]
            weight = _copied(graph, link, (weight, *link.args[1:]), value)
        operand = packed.chain[-1] if packed.chain else packed.weight
        swap = {operand: weight} | ({packed.bias: bias} if packed.bias is not None else {})
        args = fx.map_arg(product.args, lambda given: swap.get(given, given))
        made = _copied(graph, product, args, _narrowed(product.meta["val"], -1, length))
        made.kwargs = fx.map_arg(product.kwargs, lambda given: swap.get(given, given))
    assert dim >= 0
    return made


def _replace_part(end: fx.Node, chain: list[fx.Node], count: int | None, k: int, made: fx.Node) -> None:
    """Leads a part through the ops of the product (without the dim of `count` parts), to those that take it."""
    parts: int | None = None
    with end.graph.inserting_before(end):
        for link in chain:
            if link.target not in _VIEWS:
                assert parts is not None
                made, parts = _moved(link, parts, made), _parts_after(link, parts)
                continue
            shape = list(link.meta["val"].shape)
            if count is None:
                shape[-1] = made.meta["val"].shape[-1]
            else:
                before = link.args[0].meta["val"].shape  # type: ignore[union-attr]
                parts = _splits_last(tuple(before), tuple(shape)) if parts is None else parts
                assert parts is not None
                del shape[parts]
            made = called(link, aten.reshape.default, (made, shape))
    for user in list(end.users):
        number = {operator.getitem: user.args[1], aten.select.int: user.args[-1]}[user.target]
        if number == k:
            user.replace_all_uses_with(made)


def _moved(move: fx.Node, parts: int, made: fx.Node) -> fx.Node:
    """What a move does to one part, which has no dim of parts."""
    if move.target in _COPIES:
        return made
    if move.target in _ORDERS:
        order = [dim - (dim > parts) for dim in _order(move) if dim != parts]
        return called(move, aten.permute.default, (made, order))
    dim = _dim(move)
    return called(move, move.target, (made, dim - (dim > parts)))


def called(like: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A new call, where `like` stands in the model."""
    made = like.graph.call_function(target, args)
    made.meta = dict(like.meta)
    made.meta["val"] = target(args[0].meta["val"], *args[1:])
    return made
