"""Attention shared by several ranks: each has some of the heads, and heads know nothing of each other.

The projections to queries, keys and values are sharded by columns, head by head; the one after attention by rows. What
is left are modules that count heads, or take the width of their input for that of all heads together: `by_heads` makes
such a module see its own heads only. nn.MultiheadAttention computes all in one function and is rewritten.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.parallel.compile.collectives import features_number, inside
from unisono.parallel.tensor.custom_layers import is_plain
from unisono.parallel.tensor.linear import RowParallelLinear
from unisono.parallel.tensor.parameter_shards import ParameterSharder, packed
from unisono.parallel.tensor.region import Region


def by_heads(module: nn.Module, attributes: Sequence[str], region: Region) -> None:
    """Make an attention module work on this rank's heads: `attributes` are numbers that it must hold its share of.

    Its first tensor argument is replaced by a stand-in of this rank's width (see Region.stand_in), because many
    modules compute the size of a head as the input's width over the number of heads.
    """
    divide_sizes(module, attributes, region.comm.size)

    # A method, not a partial function: Dynamo then takes one graph for all attentions of a class.
    setattr(module, _REGION, region)
    setattr(module, _FORWARD, module.forward)
    module.forward = types.MethodType(_with_stand_in, module)


_REGION, _FORWARD = "unisono_region", "unisono_forward"


def _with_stand_in(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    region: Region = getattr(module, _REGION)
    forward: Callable[..., Any] = getattr(module, _FORWARD)
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return forward(*args[:position], region.stand_in(value), *args[position + 1 :], **kwargs)
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return forward(*args, **kwargs | {key: region.stand_in(value)})
    return forward(*args, **kwargs)


def divide_sizes(module: nn.Module, attributes: Sequence[str], ranks: int) -> None:
    """Divide numbers that a module counts heads or features by: attributes of it, of objects that it holds (which are
    copied, as other modules may hold them too), or sizes that its code passes to reshapes (see rules)."""
    sizes = []
    for attribute in attributes:
        if attribute.startswith("="):
            sizes.append(_size(attribute))
            continue
        owner, _, name = attribute.rpartition(".")
        if not owner:
            setattr(module, name, getattr(module, name) // ranks)
            continue
        held = copy.copy(getattr(module, owner))
        if isinstance(held, dict):
            held[name] //= ranks
        else:
            object.__setattr__(held, name, getattr(held, name) // ranks)
        setattr(module, owner, held)
    if sizes:
        module.forward = partial(_with_local_sizes, module.forward, tuple(sizes), ranks)


def _with_local_sizes(
    forward: Callable[..., Any], sizes: Sequence[tuple[int, int]], ranks: int, *args: Any, **kwargs: Any
) -> Any:
    with _LocalSizes(sizes, ranks):
        return forward(*args, **kwargs)


def _size(text: str) -> tuple[int, int]:
    """A size of a reshape, and its index counted from the end."""
    value, _, index = text.removeprefix("=").partition("@")
    return int(value), int(index)


class _LocalSizes(TorchFunctionMode):
    """In reshapes of a rank's shard that are written with the sizes of the full tensor, divides the sharded size."""

    def __init__(self, sizes: Sequence[tuple[int, int]], ranks: int) -> None:
        super().__init__()
        self._sizes, self._ranks = sizes, ranks

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("view", "reshape") and len(args) > 1:
            given = args[1] if isinstance(args[1], tuple | list) else args[1:]
            if all(isinstance(size, int) for size in given):
                return function(args[0], self._local(args[0].numel(), given))
        elif name == "unflatten" and len(args) == 3:
            return function(args[0], args[1], self._local(args[0].shape[args[1]], args[2]))
        elif name == "expand" and len(args) > 1:
            given = args[1] if isinstance(args[1], tuple | list) else args[1:]
            return function(args[0], self._expanded(args[0].shape, given))
        elif name == "split" and len(args) > 1:
            return function(args[0], self._split(args[0], args[1], *args[2:], **kwargs), *args[2:], **kwargs)
        return function(*args, **kwargs)

    def _local(self, length: int, sizes: Sequence[int]) -> list[int]:
        """The sizes, one of them divided, where the full tensor would have them."""
        is_full = -1 in sizes or math.prod(sizes) == self._ranks * length
        found = list(sizes)
        for value, index in self._sizes:
            if is_full and -len(found) <= index < 0 and found[index] == value:
                found[index] = value // self._ranks
                break
        return found

    def _expanded(self, shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
        new = len(sizes) - len(shape)
        full = [length * self._ranks if length > 1 else -1 for length in shape]
        return [*sizes[:new], *(a // self._ranks if a == b else a for a, b in zip(sizes[new:], full, strict=True))]

    def _split(self, x: torch.Tensor, lengths: Any, dim: int = 0) -> Any:
        if isinstance(lengths, int):
            return lengths // self._ranks if (lengths, 0) in self._sizes else lengths
        is_full = sum(lengths) == self._ranks * x.shape[dim]
        return [length // self._ranks for length in lengths] if is_full else lengths


def share_rope_key(attention: nn.Module, layer: nn.Module, region: Region) -> None:
    """Of latent attention (DeepSeek): `layer` gives a latent, which a column layer takes, and a key with positions,
    which every rank's heads use as it is: the gradients of the key are summed."""
    width: Any = attention.qk_rope_head_dim
    layer.forward = partial(_with_shared_key, region, width, layer.forward)


def _with_shared_key(region: Region, width: int, forward: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    y = forward(x)
    latent, key = y.split([y.shape[-1] - width, width], -1)
    return torch.cat([latent, autograd_collectives.copy(key, region.comm)], -1)


def require_latent(name: str, attention: nn.Module, ranks: int) -> None:
    if not isinstance(getattr(attention, "qk_rope_head_dim", None), int):
        raise UsageError(
            f"rule mla_kv for {name}: {type(attention).__name__} has no number qk_rope_head_dim, the width of the "
            f'key that heads share; keep its layers full with the rule {{"{name.rpartition(".")[0]}.*": "replicate"}}'
        )
    heads = [number for number in ("num_heads", "num_attention_heads") if hasattr(attention, number)]
    require_shares(name.rpartition(".")[0], attention, heads, ranks)


def require_shares(name: str, module: nn.Module, attributes: Sequence[str], ranks: int) -> None:
    """That every rank can have the same number of heads."""
    for attribute in attributes:
        value = _number(module, attribute)
        if not isinstance(value, int) or isinstance(value, bool):
            numbers = [key for key, held in vars(module).items() if type(held) is int]
            raise UsageError(
                f"rule heads:{attribute} for {name}: {type(module).__name__} has no whole number of that name; "
                f"it has {', '.join(numbers) or 'none'}"
            )
        if value % ranks:
            raise UsageError(
                f"{name} has {attribute}={value}, which tp={ranks} does not divide; use a tp that divides it"
            )


def _number(module: nn.Module, attribute: str) -> Any:
    if attribute.startswith("="):
        return _size(attribute)[0]
    owner, _, name = attribute.rpartition(".")
    held = getattr(module, owner, None) if owner else module
    return held.get(name) if isinstance(held, dict) else getattr(held, name, None)


def require_plain(name: str, attention: nn.MultiheadAttention, ranks: int) -> None:
    """That this nn.MultiheadAttention has a parallel form."""
    if not is_plain(attention):
        raise UsageError(
            f"tp={ranks}: {name} is a {type(attention).__name__}, whose forward or parameters are not those of "
            f"nn.MultiheadAttention, which tp would replace it with; keep it full with the rule "
            f'{{"{name}": "replicate"}}'
        )
    if attention.bias_k is not None or attention.add_zero_attn:
        raise UsageError(
            f"{name} has add_bias_kv or add_zero_attn, which cannot be shared by ranks; leave it replicated"
        )
    require_shares(name, attention, ["num_heads"], ranks)


class ParallelMultiheadAttention(nn.Module):
    """nn.MultiheadAttention of which this rank has some heads. Inputs, outputs and attention weights are full."""

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    _qkv_same_embed_dim = False  # makes nn.TransformerEncoderLayer not reach past `forward` for the weights

    @classmethod
    def from_attention(
        cls, attention: nn.MultiheadAttention, region: Region, shards: ParameterSharder | None = None
    ) -> ParallelMultiheadAttention:
        """The same attention, sharded."""
        ranks, rank = region.comm.size, region.comm.rank
        require_plain("nn.MultiheadAttention", attention, ranks)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.region, layer.embed_dim, layer.head_dim = region, attention.embed_dim, attention.head_dim
        layer.dropout, layer.batch_first = attention.dropout, attention.batch_first
        layer.num_heads = attention.num_heads // ranks
        layer.all_heads = attention.num_heads
        layer.features = features_number([attention.embed_dim], None)
        shards = shards or ParameterSharder(rank, ranks)
        width = attention.embed_dim
        full_value: Any
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight", "in_proj_bias"):
            full_value = getattr(attention, name)
            lengths = [width] * 3 if name.startswith("in") else [width]
            split = packed(0, lengths, ranks)
            layer.register_parameter(name, None if full_value is None else shards.shard(full_value, split))
        layer.out_proj = RowParallelLinear.from_linear(attention.out_proj, region, shards=shards)
        return layer.train(attention.training)

    region: Region
    embed_dim: int
    head_dim: int
    dropout: float
    batch_first: bool
    num_heads: int
    all_heads: int
    features: int
    out_proj: RowParallelLinear

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As nn.MultiheadAttention's."""
        if is_causal and attn_mask is None:
            raise UsageError("is_causal describes attn_mask, but attn_mask is not given; pass both")
        batched = query.dim() == 3
        q, k, v = (self._heads(x, which) for which, x in enumerate((query, key, value)))
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        if torch.compiler.is_compiling():
            q = inside(q, self.region.number, self.features)
        else:
            self.region.locate_inside([self.embed_dim])
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        y = y.transpose(1, 2).flatten(2)  # batch, length, this rank's features
        y = y if self.batch_first and batched else y.transpose(0, 1) if batched else y.squeeze(0)
        out = self.out_proj(y)
        if weights is not None:
            weights = self._shown(weights, average_attn_weights)
            weights = weights if batched else weights.squeeze(0)
        return out, weights

    def _heads(self, x: torch.Tensor, which: int) -> torch.Tensor:
        """Queries, keys or values: (batch, heads, length, head)."""
        x = self.region.enter(x)
        mine = self.num_heads * self.head_dim
        bias = None if self.in_proj_bias is None else self.in_proj_bias[which * mine : (which + 1) * mine]
        weight: torch.Tensor
        if self.in_proj_weight is None:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[which]
        else:
            weight = self.in_proj_weight[which * mine : (which + 1) * mine]
        y = F.linear(x, weight, bias)
        if y.dim() == 2:
            y = y.unsqueeze(0)
        elif not self.batch_first:
            y = y.transpose(0, 1)
        return y.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(
        self, attn_mask: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor | None:
        """What is added to the scores: both masks in one, for this rank's heads."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            if mask.shape[-2:] != (q.shape[-2], k.shape[-2]):
                raise UsageError(
                    f"attn_mask of shape {tuple(attn_mask.shape)} for {q.shape[-2]} queries and {k.shape[-2]} keys. "
                    "Under sp a block sees a shard of the sequence, and attention all of it: make the mask before "
                    "the first block, or leave sp out"
                )
            if mask.dim() == 3:  # (batch x all heads, queries, keys)
                first = self.region.comm.rank * self.num_heads
                mask = mask.unflatten(0, (-1, self.all_heads))[:, first : first + self.num_heads]
        if padding is not None:
            padded = _additive(padding, q.dtype).view(-1, 1, 1, k.shape[-2])
            mask = padded if mask is None else mask + padded
        return mask

    def _shown(self, weights: torch.Tensor, average: bool) -> torch.Tensor:
        comm = self.region.comm
        if torch.compiler.is_compiling():
            if average:
                return self.region.traced(weights.sum(1) / self.all_heads, "reduce")
            return self.region.traced(weights, "gather", 1, [self.num_heads] * comm.size)
        if average:
            return autograd_collectives.reduce(weights.sum(1) / self.all_heads, comm)
        return autograd_collectives.gather(weights, 1, [self.num_heads] * comm.size, comm)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads} of {self.all_heads}"


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype == torch.bool:  # True: may not be seen
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.to(dtype)
