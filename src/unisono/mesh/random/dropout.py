"""torch's dropouts on a RandomState's numbers.

While a RandomState is active (see active.py), these replace F.dropout and its variants (so also nn.Dropout and
nn.MultiheadAttention), and handle F.scaled_dot_product_attention where dropout_p > 0. Not replaced: names that were
imported from torch.nn.functional beforehand, and the dropout inside torch's native LSTM and GRU; random_ops.py refuses
these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from unisono.errors import UsageError
from unisono.mesh.global_index import Part
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Partial, local_box
from unisono.mesh.random.active import active_state
from unisono.mesh.random.draw import Draw, compiled, drop_limit, gpu_kernels
from unisono.torch_patches import Target, attention, original

if TYPE_CHECKING:
    from unisono.mesh.random.state import RandomState

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # triton takes the scale as a float32


def apply(state: RandomState, x: torch.Tensor, p: float, kind: str = "dropout") -> torch.Tensor:
    """Dropout of x with probability p; a DTensor's shard follows from its placements."""
    if not 0 <= p <= 1:
        raise UsageError(f"dropout(p={p}): expected a probability from 0 to 1")
    if isinstance(x, DTensor):
        return _apply_to_dtensor(state, x, p)
    draw = state.draw(x.shape, kind, like=x)
    return scaled(x, draw, p)


def scaled(x: torch.Tensor, draw: Draw, p: float) -> torch.Tensor:
    """x where `draw` keeps it, over 1 - p; 0 elsewhere."""
    if p == 0 or x.is_meta:
        return x
    if p == 1:
        return x * 0.0
    if x.is_cuda and x.dtype in _KERNEL_DTYPES and gpu_kernels() is not None:
        return _GpuDropout.apply(x, draw, p)
    return x * _noise(draw, p, x)


def _noise(draw: Draw, p: float, like: torch.Tensor) -> torch.Tensor:
    is_plain = like.is_cpu and like.dtype in (torch.float32, torch.float64) and draw.keys is None
    if is_plain and (kernels := compiled()) is not None:
        made: torch.Tensor = kernels.noise(draw.stream(), draw.runs, drop_limit(p), 1 / (1 - p), like.dtype)
        return made.view(draw.shape)
    return draw.keep(p, like.device).to(like.dtype).mul_(1 / (1 - p))


class _GpuDropout(torch.autograd.Function):
    """Draws the mask again in the backward instead of keeping it. Linear, and its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, draw: Draw, p: float) -> torch.Tensor:
        ctx.draw, ctx.p = draw, p
        kernels = gpu_kernels()
        assert kernels is not None
        return kernels.dropout(x, draw.stream(), draw.runs, drop_limit(p), 1 / (1 - p))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _GpuDropout.apply(grad, ctx.draw, ctx.p), None, None


class _Local(torch.autograd.Function):
    """A DTensor's local shard. The gradient gets the DTensor's placement and strides: PyTorch 2.11's `to_local`
    computes the strides of an uneven tensor's gradient from the shard, and a leaf whose gradient has other strides than
    itself gets a full copy on every rank."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.layout = {"device_mesh": x.device_mesh, "placements": x.placements, "shape": x.shape, "stride": x.stride()}
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        return DTensor.from_local(grad, run_check=False, **ctx.layout)


def _apply_to_dtensor(state: RandomState, x: DTensor, p: float) -> DTensor:
    if any(isinstance(placement, Partial) for placement in x.placements):
        raise UsageError(f"dropout of a tensor with placements {x.placements}; reshard it so that none is Partial")
    local = _Local.apply(x)
    sizes, offsets = local_box(x.shape, Mesh.of(x.device_mesh), x.placements)
    parts = {
        dim: Part(range(offset, offset + size), x.shape[dim])
        for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
        if size != x.shape[dim]
    }
    dropped = scaled(local, state.draw(local.shape, parts=parts), p)
    return DTensor.from_local(dropped, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


# ---- the replacements --------------------------------------------------------------------------------------------


def _steps_in(x: torch.Tensor, p: float, training: bool) -> RandomState | None:
    """The state that draws this call, or None where torch's own function does (nothing random, or a bad p)."""
    state = active_state() if training and 0 < p <= 1 else None
    return state if state is not None and (state.counts_meta or not x.is_meta) else None


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    state = _steps_in(input, p, training)
    if state is None:
        return _own["dropout"](input, p, training, inplace)
    dropped = apply(state, input, p)
    return input.copy_(dropped) if inplace else dropped


def _channels(plain_dims: int) -> Callable[..., torch.Tensor]:
    """Dropout of entire channels: `plain_dims` is how many dims an input without a batch has."""
    name = f"dropout{plain_dims - 1}d"

    def replacement(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        state = _steps_in(input, p, training)
        if state is None:
            return _own[name](input, p, training, inplace)
        # torch takes three dims in dropout2d for (batch, channels, length), not for an input without a batch.
        channel_dims = 1 if input.dim() == plain_dims != 3 else 2
        noise = apply(state, input.new_ones(input.shape[:channel_dims]), p)
        noise = noise.reshape(*noise.shape, *[1] * (input.dim() - channel_dims))
        return input.mul_(noise) if inplace else input * noise

    return replacement


def _alpha(name: str, by_channel: bool) -> Callable[..., torch.Tensor]:
    """Dropout that keeps the mean and variance of what SELU gives: dropped elements take SELU's lowest value."""
    lowest = -1.7580993408473766

    def replacement(input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> torch.Tensor:
        state = _steps_in(input, p, training)
        if state is None:
            return _own[name](input, p, training, inplace)
        shape = input.shape[:2] if by_channel else input.shape
        keep = state.draw(shape, like=input).keep(p, input.device) if p < 1 else torch.zeros(shape, dtype=torch.bool)
        keep = keep.to(input.device).reshape(*shape, *[1] * (input.dim() - len(shape)))
        a = 0.0 if p == 1 else ((1 - p) * (1 + p * lowest**2)) ** -0.5
        out = torch.where(keep, input, torch.full_like(input, lowest)) * a - a * p * lowest
        return input.copy_(out) if inplace else out

    return replacement


def handle_attention(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The attention dispatcher's handler: dropout of the weights is drawn by their global indices."""
    state = _steps_in(query, dropout_p, True)
    if state is None:
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    weights = attention_weights(query, key, attn_mask, is_causal, scale, enable_gqa)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return apply(state, weights, dropout_p, "attention") @ value


def attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The attention weights (..., queries, keys), before dropout."""
    if attn_mask is not None and is_causal:
        raise UsageError("scaled_dot_product_attention was given attn_mask and is_causal; pass one of them")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return scores.softmax(-1)
    if attn_mask.dtype == torch.bool:
        # A query that may see no key gives zeros, as torch's own does.
        weights = scores.masked_fill(~attn_mask, -math.inf).softmax(-1)
        return weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)
    return (scores + attn_mask).softmax(-1)


REPLACEMENTS: dict[Target, Callable[..., Any]] = {
    (F, "dropout"): _dropout,
    (F, "dropout1d"): _channels(2),
    (F, "dropout2d"): _channels(3),
    (F, "dropout3d"): _channels(4),
    (F, "alpha_dropout"): _alpha("alpha_dropout", by_channel=False),
    (F, "feature_alpha_dropout"): _alpha("feature_alpha_dropout", by_channel=True),
}
attention.innermost = handle_attention
_own = {name: original(owner, name) for owner, name in REPLACEMENTS}
