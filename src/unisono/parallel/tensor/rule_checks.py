"""Rules that cannot be right for a model, refused before anything is sharded."""

from __future__ import annotations

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.parallel.rules.rules import Style, Styles
from unisono.parallel.tensor import attention, convolution, custom_layers, user_hooks, vocabulary
from unisono.parallel.tensor.linear import features, is_linear, part_lengths

INSIDE = ("row_sum", "column_inside")
LINEAR_KINDS = ("column", "column_gather", "vocab_head", "logits", "row", "row_split", *INSIDE)
HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")


def require_sound(model: nn.Module, styles: Styles, ranks: int) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, style in styles.items():
        module = modules.get(name)
        if module is None:
            _require_shardable_parameter(name, model.get_parameter(name), style, ranks)
        elif convolution.is_shardable(module) and style.kind in (*LINEAR_KINDS, "channels"):
            convolution.require_shardable(name, module, style, ranks)
        elif style.kind in LINEAR_KINDS:
            _require(is_linear(module), name, style, module, "an nn.Linear")
            part_lengths(features(module)[1], style.parts)
            if is_rowwise(style) and len(style.parts) > 1:
                raise UsageError(f"the rule for {name} is {style}, which is for expert weights; expected row")
            _require_full_heads(name, modules[name.rpartition(".")[0]], module, style, ranks)
            _require_kept(name, module, style, ranks)
        elif style.kind == "vocab":
            _require(isinstance(module, nn.Embedding), name, style, module, "an nn.Embedding")
            vocabulary.require_plain(module)
            _require_kept(name, module, style, ranks)
        elif style.kind == "heads" and isinstance(module, nn.MultiheadAttention):
            attention.require_plain(name, module, ranks)
            user_hooks.require_hooks_kept(name, module, style)
        elif style.kind in ("heads", "sizes"):
            attention.require_shares(name, module, style.attributes, ranks)
        elif style.kind == "mla_kv":
            _require(is_linear(module), name, style, module, "an nn.Linear")
            attention.require_latent(name, modules[name.rpartition(".")[0]], ranks)


def _require(right: bool, name: str, style: Style, module: nn.Module, expected: str) -> None:
    if not right:
        raise UsageError(f"the rule for {name} is {style}, but it is a {type(module).__name__}; expected {expected}")


def _require_kept(name: str, module: nn.Module, style: Style, ranks: int) -> None:
    """What a user has made of a layer must be right on its shards: a forward of its own, and hooks."""
    if ranks == 1:
        return
    user_hooks.require_hooks_kept(name, module, style)
    if style.kind in INSIDE and not custom_layers.is_plain(module):
        raise UsageError(f"the rule for {name} is {style}, but its forward is not torch's own; expected an nn.Linear")
    if not custom_layers.is_plain(module):
        custom_layers.require_sharding(name, module, style, ranks)


def _require_shardable_parameter(name: str, weight: torch.Tensor, style: Style, ranks: int) -> None:
    if style.kind == "channels" and style.dim < weight.dim() and weight.shape[style.dim] % ranks == 0:
        return
    if style.kind not in ("column", "row", "summed") or (style.kind != "summed" and weight.dim() != 3):
        raise UsageError(
            f"the rule for {name} is {style}, but it is a parameter of shape {tuple(weight.shape)}; "
            "expected column or row for expert weights (experts, outputs, inputs), channels for a dim that tp divides, "
            "summed, or a rule for its module"
        )


def _require_full_heads(name: str, parent: nn.Module, linear: nn.Module, style: Style, ranks: int) -> None:
    """A layer inside a module with a head size is sharded between heads, not through them."""
    if style.kind not in ("column", "row"):
        return
    inputs, outputs = features(linear)
    length = inputs if style.kind == "row" else outputs // sum(style.parts)
    for attribute in HEAD_SIZES:
        size = getattr(parent, attribute, None)
        if isinstance(size, int) and size > 0 and length % size == 0 and (length // size) % ranks:
            raise UsageError(
                f"{name} has {length // size} heads of {size}, which tp={ranks} does not divide; use a tp that does"
            )


def is_rowwise(style: Style) -> bool:
    return style.kind in ("row", "row_split", "row_sum")
