"""What runs on local shards where that is not simply the op itself.

An Option names a rewrite; all options of one op that name one name the same. A rewrite is called once for the op, with
the op's arguments in which tensors are local shards, and a LocalOp that knows the placements on all axes:

    REWRITES[name](local_op, *args, **kwargs)

It gives the local result (or list of results), and gradients through it follow the option (see `option`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from unisono.graph.program.local_op import LocalOp
from unisono.graph.program.sharded_loss import cross_entropy, mean_loss, nll_loss
from unisono.graph.rules.reduce import reduced_dims
from unisono.mesh.random import dropout as dropouts
from unisono.mesh.sharded_batch_norm import normalised, of_channels, scaled, sum_over_batch

# ---- shapes ------------------------------------------------------------------------------------------------------


def _view(local_op: LocalOp, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    shape = local_op.result_shape()
    name = str(local_op.node.target)
    return tensor.expand(shape) if "expand" in name or "broadcast" in name else tensor.reshape(shape)


def _broadcast_tensors(local_op: LocalOp, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.expand(local_op.result_shape(output)) for output, tensor in enumerate(tensors)]


def _factory(local_op: LocalOp, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Makes the shard: of numbers that are all the same by its shape, of a range by where it begins."""
    sizes, offsets = local_op.result_box()
    name = str(local_op.node.target)
    result = local_op.call.results[0]
    if "arange" in name:
        start, step = local_op.call.arguments.get("start", 0), local_op.call.arguments.get("step", 1)
        options = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "layout")}
        options.setdefault("dtype", result.dtype)
        steps = torch.arange(offsets[0], offsets[0] + sizes[0], **options)
        return steps if (start, step) == (0, 1) else steps * step + start
    at = next(i for i, argument in enumerate(local_op.node.target._schema.arguments) if argument.name == "size")  # type: ignore[union-attr]
    return local_op.node.target(*args[:at], sizes, *args[at + 1 :], **kwargs)  # type: ignore[operator]


# ---- sums and means ----------------------------------------------------------------------------------------------


def _mean(local_op: LocalOp, tensor: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
    """A rank's share of the mean: its sum over the number of elements of the full tensor."""
    full = local_op.call.shape()
    dims = sorted(reduced_dims(local_op.call))
    count = torch.Size([full[dim] for dim in dims]).numel()
    keepdim = bool(local_op.call.arguments.get("keepdim", False))
    dtype = local_op.call.arguments.get("dtype")
    return tensor.sum(dims, keepdim=keepdim, dtype=dtype) / count


def _variance(local_op: LocalOp, tensor: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
    """The same on all ranks; gradients flow into each rank's own elements."""
    call = local_op.call
    dims = sorted(reduced_dims(call))
    axes = local_op.axes_sharding(0, *dims)
    count = torch.Size([call.shape()[dim] for dim in dims]).numel()
    mean = local_op.reduce(tensor.detach().sum(dims, keepdim=True), "sum", axes) / count
    own = (tensor - mean).square().sum(dims, keepdim=bool(call.arguments.get("keepdim", False)))
    total = own + (local_op.reduce(own, "sum", axes) - own).detach()
    correction = call.arguments.get("correction", float(call.arguments.get("unbiased", True)))
    return total / max(count - (1.0 if correction is None else correction), 0.0)


# ---- lookups -----------------------------------------------------------------------------------------------------


def _embedding(
    local_op: LocalOp, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, *_: Any, **__: Any
) -> torch.Tensor:
    """Rows of the table that are elsewhere count as zeros here."""
    sizes, offsets = local_op.box(local_op.number("weight"))
    mine = (indices >= offsets[0]) & (indices < offsets[0] + sizes[0])
    rows = torch.where(mine, indices - offsets[0], 0)
    padding = padding_idx - offsets[0] if offsets[0] <= padding_idx < offsets[0] + sizes[0] else None
    found = F.embedding(rows, weight)
    if padding is not None:  # its row is found, but learns nothing
        found = torch.where((indices == padding_idx)[..., None], found.detach(), found)
    return torch.where(mine[..., None], found, 0.0)


def _grouped_mm(
    local_op: LocalOp, tokens: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, *_: Any
) -> torch.Tensor:
    """The experts here, on their tokens; zeros for the tokens of others."""
    sizes, offsets = local_op.box(1)
    bounds = [0, *ends.tolist()]
    result = tokens.new_zeros(len(tokens), matrices.shape[-1])
    products = []
    for expert in range(sizes[0]):
        start, end = bounds[offsets[0] + expert], bounds[offsets[0] + expert + 1]
        products.append(tokens[start:end] @ matrices[expert])
    first, last = bounds[offsets[0]], bounds[offsets[0] + sizes[0]]
    return torch.cat([result[:first], *products, result[last:]])


# ---- normalisation -----------------------------------------------------------------------------------------------


def _batch_norm(
    local_op: LocalOp,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: None,
    running_var: None,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> torch.Tensor:
    """In training; running statistics are ops of their own in the graph."""
    full = local_op.call.shape("input")
    axes = local_op.axes_sharding(local_op.number("input"), *(dim for dim in range(len(full)) if dim != 1))

    def reduce(tensor: torch.Tensor, op: str) -> torch.Tensor:
        return local_op.reduce(tensor, op, axes)

    def statistics(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = wide.new_tensor(torch.Size(full).numel() // full[1])
        mean = reduce(sum_over_batch(wide), "sum") / count
        return mean, reduce(sum_over_batch((wide - of_channels(mean, wide)).square()), "sum"), count

    return scaled(normalised(x, eps, statistics, reduce)[0], weight, bias).to(x.dtype)


# ---- attention ---------------------------------------------------------------------------------------------------


def _attention(
    local_op: LocalOp,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    full, at = local_op.call.shape("query"), local_op.number("query")
    sizes, offsets = local_op.box(at)
    if is_causal and sizes[-2] != full[-2]:
        positions = torch.arange(offsets[-2], offsets[-2] + sizes[-2], device=query.device)
        attn_mask, is_causal = positions[:, None] >= torch.arange(key.shape[-2], device=query.device), False
    if not dropout_p:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    weights = dropouts.attention_weights(query, key, attn_mask, is_causal, **options)
    if options.get("enable_gqa"):
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    shape = (*full[:-1], local_op.call.shape("key")[-2])
    rows = {dim: part for dim, part in local_op.parts(full, local_op.inputs[at]).items() if dim < len(full) - 1}
    draw = local_op.draw(tuple(weights.shape), rows)
    assert len(shape) == weights.dim()
    return dropouts.scaled(weights, draw, dropout_p) @ value


# ---- randomness --------------------------------------------------------------------------------------------------


def _dropout(local_op: LocalOp, tensor: torch.Tensor, p: float, *_: Any) -> torch.Tensor:
    parts = local_op.parts(local_op.call.shape(), local_op.outputs[0])
    return dropouts.scaled(tensor, local_op.draw(tuple(tensor.shape), parts), p)


def _random(local_op: LocalOp, *args: Any, **kwargs: Any) -> torch.Tensor:
    result = local_op.call.results[0]
    shape = local_op.result_shape()
    draw = local_op.draw(shape, local_op.parts(tuple(result.shape), local_op.outputs[0]))
    beside = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
    device = torch.device(kwargs.get("device") or beside)
    make = draw.normal if "randn" in str(local_op.node.target) else draw.uniform
    return make(result.dtype, device)


REWRITES: dict[str, Callable[..., Any]] = {
    "view": _view,
    "broadcast_tensors": _broadcast_tensors,
    "factory": _factory,
    "mean": _mean,
    "variance": _variance,
    "batch_norm": _batch_norm,
    "mean_loss": mean_loss,
    "embedding": _embedding,
    "grouped_mm": _grouped_mm,
    "attention": _attention,
    "dropout": _dropout,
    "random": _random,
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
}
