"""What each op costs: the graph is run once on tensors without data, while autograd's hooks record what it keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from unisono.graph.capture.autocast import WEIGHT_CAST
from unisono.graph.capture.op import Memory
from unisono.graph.rules.call import OpCall, tensors_of

META = torch.device("meta")


@dataclass
class NodeCost:
    flops: int = 0
    bytes_moved: int = 0
    saved: int = 0
    saves: list[Memory] = field(default_factory=list)  # for the backward, whoever else keeps it
    results: tuple[Memory, ...] = ()
    tracked: bool = False  # whether its result has a gradient


def weigh(graph: fx.Graph, parameters: Mapping[str, bool], free: set[str]) -> dict[str, NodeCost]:
    """The weights of all nodes. `parameters`: by node, whether each is trained. What `free` nodes hold is not counted
    as saved: it is there anyway."""
    scale = _NodeCosts(graph, parameters, free)
    with torch.autograd.graph.saved_tensors_hooks(scale.keep, lambda saved: saved):
        for node in graph.nodes:
            scale.run(node)
    return scale.weights


@dataclass
class _NodeCosts:
    graph: fx.Graph
    parameters: Mapping[str, bool]
    free: set[str]
    weights: dict[str, NodeCost] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    kept: dict[int, Any] = field(default_factory=dict)  # storages by address; held, so that addresses stay theirs
    seen: dict[int, Any] = field(default_factory=dict)
    now: NodeCost = field(default_factory=NodeCost)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.now.saves.append(self._memory(tensor))
        if storage._cdata not in self.kept:
            self.kept[storage._cdata] = storage
            self.now.saved += storage.nbytes()
        return tensor

    def _memory(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        self.seen[storage._cdata] = storage
        return storage._cdata, storage.nbytes()

    def run(self, node: fx.Node) -> None:
        self.now = self.weights[node.name] = NodeCost()
        if node.op == "placeholder":
            self.values[node] = self._placeholder(node)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: self.values[given])
            result = self._call(node, args, kwargs)
            self.values[node] = result
            if node.meta.get(WEIGHT_CAST):  # counted with the parameters
                self.kept.update((t.untyped_storage()._cdata, t.untyped_storage()) for t in tensors_of(result))
            self._weigh(node, tensors_of(result))
        self.now.results = tuple(map(self._memory, tensors_of(self.values.get(node))))
        self.now.tracked = any(t.requires_grad for t in tensors_of(self.values.get(node)))
        for used in node.all_input_nodes:
            if all(self._done(user) for user in used.users):
                self.values.pop(used, None)

    def _done(self, user: fx.Node) -> bool:
        return user.name in self.weights

    def _placeholder(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        if node.name in self.free:
            self.kept[made.untyped_storage()._cdata] = made.untyped_storage()
        return made.requires_grad_(self.parameters.get(node.name, False))

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": META}
        special = _SPECIAL.get(getattr(node.target, "_overloadpacket", None))
        try:
            with torch.set_grad_enabled(not node.meta.get("no_grad", False)):
                return (special or node.target)(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError):
            return _of_that_kind(node, args, kwargs)

    def _weigh(self, node: fx.Node, results: tuple[torch.Tensor, ...]) -> None:
        self.now.flops = flops(node)
        given = [t for used in node.all_input_nodes for t in tensors_of(self.values.get(used))]
        storages = {t.untyped_storage()._cdata for t in given}
        if results and all(t.untyped_storage()._cdata in storages for t in results):
            return  # a view
        self.now.bytes_moved = sum(t.numel() * t.itemsize for t in (*given, *results))


def _of_that_kind(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What an op gives that does not run without data: from the trace, with gradients where floats come of floats."""
    gradient = any(t.requires_grad for value in (*args, *kwargs.values()) for t in tensors_of(value))

    def empty(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty(value.shape, dtype=value.dtype, device=META)
        return made.requires_grad_(gradient and value.is_floating_point())

    value = node.meta.get("val")
    return type(value)(map(empty, value)) if isinstance(value, list | tuple) else empty(value)


# ---- ops whose kernels keep something other than their composition would ----------------------------------------


class _FusedAttention(torch.autograd.Function):
    """Keeps what every fused attention keeps: its inputs, its result and one number a query."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        # Kernels write heads side by side, so that joining them afterwards copies nothing.
        *batch, heads, length, _ = query.shape if query.dim() > 3 else (1, *query.shape)
        result = query.new_empty(*batch, length, heads, value.shape[-1]).transpose(-2, -3)
        result = result if query.dim() > 3 else result[0]
        normalisers = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, *(() if mask is None else (mask,)), result, normalisers)
        return result


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, *_: Any, **__: Any
) -> torch.Tensor:
    return _FusedAttention.apply(query, key, value, attn_mask)


class _MaskedDropout(torch.autograd.Function):
    """Keeps one byte an element, as torch's kernel for GPUs does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return _MaskedDropout.apply(x) if train and p > 0 else F.dropout(x, p, train)


_SPECIAL: dict[Any, Any] = {
    torch.ops.aten.scaled_dot_product_attention: _attention,
    torch.ops.aten.dropout: _dropout,
}


# ---- products ---------------------------------------------------------------------------------------------------


def flops(node: fx.Node) -> int:
    """Multiplications and additions of a product, of each 2 for every pair of numbers that meet; 0 for other ops."""
    name = str(getattr(node.target, "_overloadpacket", ""))
    if name in ("aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"):
        call = OpCall(node)
        left = {"aten.addmm": "mat1", "aten.baddbmm": "batch1", "aten.linear": "input"}.get(name, "self")
        return 2 * math.prod(call.result) * call.shape(left)[-1]
    if name == "aten.scaled_dot_product_attention":
        call = OpCall(node)
        query, key, value = call.shape("query"), call.shape("key"), call.shape("value")
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if name in ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution"):
        call = OpCall(node)
        return 2 * math.prod(call.result) * math.prod(call.shape("weight")[1:])
    if name == "aten.einsum":
        return _einsum_flops(OpCall(node))
    if "grouped_mm" in name:
        call = OpCall(node)
        return 2 * math.prod(call.result) * call.shape()[-1]
    return 0


def _einsum_flops(call: OpCall) -> int:
    terms = call["equation"].replace(" ", "").partition("->")[0].split(",")
    if any("." in term for term in terms):
        return 0
    sizes = {
        letter: size
        for term, shape in zip(terms, call.shapes, strict=True)
        for letter, size in zip(term, shape, strict=True)
    }
    return 2 * math.prod(sizes.values())
