"""Rules for models that nobody wrote rules for: read off the blocks' layers, then tried.

Two patterns cover most blocks: layers up to a hidden width and one back down (an MLP, plain or gated), and an attention
that counts its heads, with queries, keys and values in one layer or in three. Whether the module computes what its
layers' shapes suggest is not guessed: each candidate is sharded among a few simulated ranks, in this process, and kept
only if on random input they give what the full module gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.blocks import Blocks, find_blocks
from unisono.parallel.meta.meta_tensors import realised_copy
from unisono.parallel.rules.inferred import form
from unisono.parallel.rules.rules import Rules
from unisono.parallel.rules.trial import simulated_ranks, together
from unisono.parallel.tensor.linear import features, is_linear

_HEADS = ("heads", "num_heads", "n_head", "n_heads", "num_attention_heads", "nhead")
_KEY_HEADS = ("kv_heads", "num_kv_heads", "n_kv_head", "n_kv_heads", "num_key_value_heads")


def derived(model: nn.Module, ranks: int, shard: Any) -> dict[str, str]:
    """Rules for the model's repeated blocks; empty where none can be shown to hold.

    shard(module, rules, comm) shares a module between the ranks of a communicator.
    """
    blocks = _blocks(model)
    if blocks is None:
        return {}
    proved: dict[Any, dict[str, str]] = {}  # by what blocks that are built alike have in common
    found: dict[str, str] = {}
    for number, block in enumerate(blocks.modules):
        kind = form(block)
        if kind not in proved:
            proved[kind] = _proved(block, ranks, shard)
        found |= {f"{blocks.name(number)}.{name}": text for name, text in proved[kind].items()}
    return found


def _proved(block: nn.Module, ranks: int, shard: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, module, rules in _candidates(block):
        if _holds(module, rules, simulated_ranks(ranks), shard):
            found |= {f"{name}.{relative}".strip("."): text for relative, text in rules.items()}
    return found


def _blocks(model: nn.Module) -> Blocks | None:
    try:
        return find_blocks(model)
    except UsageError:
        return None


# ---- what shapes suggest -------------------------------------------------------------------------------------------


def _candidates(block: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    for name, module in block.named_modules():
        layers = {child: features(layer) for child, layer in module.named_children() if is_linear(layer)}
        heads = [attribute for attribute in _HEADS if type(getattr(module, attribute, None)) is int]
        rules = _attention(module, heads[0], layers) if heads else _mlp(layers)
        if rules:
            yield name, module, rules


def _mlp(layers: dict[str, tuple[int, int]]) -> dict[str, str]:
    """Layers from one width to another, and after them one back."""
    names = list(layers)
    for index, down in enumerate(names):
        hidden, width = layers[down]
        ups = [name for name in names[:index] if layers[name] == (width, hidden)]
        if ups and hidden != width:
            return {**dict.fromkeys(ups, "column"), down: "row"}
    return {}


def _attention(module: nn.Module, heads: str, layers: dict[str, tuple[int, int]]) -> dict[str, str]:
    """Either (width, 3 width) and (width, width), or three from the width and one back to it, in this order."""
    names = list(layers)
    if len(names) not in (2, 4):
        return {}
    *projections, out = names
    width = layers[out][1]
    if len(projections) == 1:
        if layers[projections[0]] != (width, 3 * width) or layers[out][0] != width:
            return {}
        inside = {projections[0]: "column:qkv"}
    else:
        inside = dict.fromkeys(projections, "column")
    numbers = [heads, *(name for name in _KEY_HEADS if type(getattr(module, name, None)) is int)]
    return {"": f"heads:{','.join(numbers)}", **inside, out: "row"}


# ---- whether it holds ------------------------------------------------------------------------------------------------


def _holds(module: nn.Module, rules: Rules, ranks: int, shard: Any) -> bool:
    """Whether simulated ranks that share the module give what it gives alone."""
    layer = next(layer for layer in module.children() if is_linear(layer))
    real = realised_copy(module)
    if real is None:
        return False
    full = real.double().cpu().eval()
    x = torch.randn(2, 5, features(layer)[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        with no_side_effects(module), torch.no_grad():
            expected = _first(full(x))
            if not isinstance(expected, torch.Tensor):
                return False
            outcomes = together(full, rules, ranks, lambda shared: _first(shared(x.clone())), shard)
    except Exception:  # a module that takes other arguments, or cannot be sharded this way: not derivable
        return False
    return all(outcome.shape == expected.shape and torch.allclose(outcome, expected) for outcome in outcomes)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) else output
