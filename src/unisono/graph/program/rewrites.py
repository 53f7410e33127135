"""What runs on local pieces where that is not simply the op itself.

An Option names a rewrite; all options of one op that name one name the same. A rewrite is called once for the op, with
the op's arguments in which tensors are local pieces, and a Place that knows the placements on all axes:

    REWRITES[name](place, *args, **kwargs)

It gives the local result (or list of results), and gradients through it follow the option (see `option`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from unisono.graph.program.local_op import Place
from unisono.graph.program.sharded_loss import cross_entropy, mean_loss, nll_loss
from unisono.graph.program.sharded_norm import batch_norm
from unisono.graph.rules.reduce import reduced_dims
from unisono.mesh import dropout as dropouts

# ---- shapes ------------------------------------------------------------------------------------------------------


def _view(place: Place, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    shape = place.result_shape()
    name = str(place.node.target)
    return tensor.expand(shape) if "expand" in name or "broadcast" in name else tensor.reshape(shape)


def _broadcast_tensors(place: Place, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.expand(place.result_shape(output)) for output, tensor in enumerate(tensors)]


def _factory(place: Place, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Makes the piece: of numbers that are all the same by its shape, of a range by where it begins."""
    sizes, offsets = place.result_box()
    name = str(place.node.target)
    result = place.call.results[0]
    if "arange" in name:
        start, step = place.call.arguments.get("start", 0), place.call.arguments.get("step", 1)
        options = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "layout")}
        options.setdefault("dtype", result.dtype)
        steps = torch.arange(offsets[0], offsets[0] + sizes[0], **options)
        return steps if (start, step) == (0, 1) else steps * step + start
    at = next(i for i, argument in enumerate(place.node.target._schema.arguments) if argument.name == "size")  # type: ignore[union-attr]
    return place.node.target(*args[:at], sizes, *args[at + 1 :], **kwargs)  # type: ignore[operator]


# ---- sums and means ----------------------------------------------------------------------------------------------


def _mean(place: Place, tensor: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
    """A rank's share of the mean: its sum over the number of elements of the whole."""
    whole = place.call.shape()
    dims = sorted(reduced_dims(place.call))
    count = torch.Size([whole[dim] for dim in dims]).numel()
    keepdim = bool(place.call.arguments.get("keepdim", False))
    dtype = place.call.arguments.get("dtype")
    return tensor.sum(dims, keepdim=keepdim, dtype=dtype) / count


def _variance(place: Place, tensor: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
    """The same on all ranks; gradients flow into each rank's own elements."""
    call = place.call
    dims = sorted(reduced_dims(call))
    axes = place.axes_cutting(0, *dims)
    count = torch.Size([call.shape()[dim] for dim in dims]).numel()
    mean = place.talk(tensor.detach().sum(dims, keepdim=True), "sum", axes) / count
    own = (tensor - mean).square().sum(dims, keepdim=bool(call.arguments.get("keepdim", False)))
    total = own + (place.talk(own, "sum", axes) - own).detach()
    correction = call.arguments.get("correction", float(call.arguments.get("unbiased", True)))
    return total / max(count - (1.0 if correction is None else correction), 0.0)


# ---- lookups -----------------------------------------------------------------------------------------------------


def _embedding(
    place: Place, weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, *_: Any, **__: Any
) -> torch.Tensor:
    """Rows of the table that are elsewhere count as zeros here."""
    sizes, offsets = place.box(place.number("weight"))
    mine = (indices >= offsets[0]) & (indices < offsets[0] + sizes[0])
    rows = torch.where(mine, indices - offsets[0], 0)
    padding = padding_idx - offsets[0] if offsets[0] <= padding_idx < offsets[0] + sizes[0] else None
    found = F.embedding(rows, weight)
    if padding is not None:  # its row is found, but learns nothing
        found = torch.where((indices == padding_idx)[..., None], found.detach(), found)
    return torch.where(mine[..., None], found, 0.0)


def _grouped_mm(place: Place, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, *_: Any) -> torch.Tensor:
    """The experts here, on their rows; zeros for the rows of others."""
    sizes, offsets = place.box(1)
    bounds = [0, *ends.tolist()]
    result = rows.new_zeros(len(rows), matrices.shape[-1])
    pieces = []
    for expert in range(sizes[0]):
        start, end = bounds[offsets[0] + expert], bounds[offsets[0] + expert + 1]
        pieces.append(rows[start:end] @ matrices[expert])
    first, last = bounds[offsets[0]], bounds[offsets[0] + sizes[0]]
    return torch.cat([result[:first], *pieces, result[last:]])


# ---- attention ---------------------------------------------------------------------------------------------------


def _attention(
    place: Place,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    whole, at = place.call.shape("query"), place.number("query")
    sizes, offsets = place.box(at)
    if is_causal and sizes[-2] != whole[-2]:
        positions = torch.arange(offsets[-2], offsets[-2] + sizes[-2], device=query.device)
        attn_mask, is_causal = positions[:, None] >= torch.arange(key.shape[-2], device=query.device), False
    if not dropout_p:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    weights = dropouts.attention_weights(query, key, attn_mask, is_causal, **options)
    if options.get("enable_gqa"):
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    shape = (*whole[:-1], place.call.shape("key")[-2])
    rows = {dim: part for dim, part in place.parts(whole, place.inputs[at]).items() if dim < len(whole) - 1}
    draw = place.draw(tuple(weights.shape), rows)
    assert len(shape) == weights.dim()
    return dropouts.scaled(weights, draw, dropout_p) @ value


# ---- randomness --------------------------------------------------------------------------------------------------


def _dropout(place: Place, tensor: torch.Tensor, p: float, *_: Any) -> torch.Tensor:
    parts = place.parts(place.call.shape(), place.outputs[0])
    return dropouts.scaled(tensor, place.draw(tuple(tensor.shape), parts), p)


def _random(place: Place, *args: Any, **kwargs: Any) -> torch.Tensor:
    result = place.call.results[0]
    shape = place.result_shape()
    draw = place.draw(shape, place.parts(tuple(result.shape), place.outputs[0]))
    beside = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
    device = torch.device(kwargs.get("device") or beside)
    make = draw.normal if "randn" in str(place.node.target) else draw.uniform
    return make(result.dtype, device)


REWRITES: dict[str, Callable[..., Any]] = {
    "view": _view,
    "broadcast_tensors": _broadcast_tensors,
    "factory": _factory,
    "mean": _mean,
    "variance": _variance,
    "batch_norm": batch_norm,
    "mean_loss": mean_loss,
    "embedding": _embedding,
    "grouped_mm": _grouped_mm,
    "attention": _attention,
    "dropout": _dropout,
    "random": _random,
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
}
