"""How much of a model tensor parallelism shards, in one line: of its parameters, and of its floating-point operations.

tp=2 shards 97% of the parameters and 99% of the FLOPs; largest module left replicated: pos (295 thousand parameters):
nn.Embedding whose rows are positions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.amounts import format_count
from unisono.parallel.rules.dataflow import INPUT, PARAMETER, TOKENS, Dataflow, recorded
from unisono.parallel.rules.rules import Styles
from unisono.parallel.rules.sharded_dims import sharded_dims
from unisono.parallel.tensor import adapters, vocabulary
from unisono.parallel.tensor.convolution import is_convolution
from unisono.parallel.tensor.linear import features, is_linear

_LITTLE = 0.5  # of the parameters: below, the user is warned
_INSIDE = ("column", "column_inside", "row_sum")  # layers whose output is used inside a region
_SHARDED = (*_INSIDE, "column_gather", "row", "row_split", "logits", "vocab_head", "heads")


@dataclass(frozen=True)
class Coverage:
    ranks: int
    parameters: float  # fractions that are sharded
    flops: float | None  # None where the model could not be run to count them
    largest: str = ""  # module with most replicated parameters
    largest_size: int = 0
    reason: str = ""

    @property
    def is_little(self) -> bool:
        return self.parameters < _LITTLE

    def __str__(self) -> str:
        flops = "" if self.flops is None else f" and {self.flops:.0%} of the FLOPs"
        left = ""
        if self.largest_size:
            left = (
                f"; largest module left replicated: {self.largest} ({format_count(self.largest_size)} parameters): "
                f"{self.reason}"
            )
        return f"tp={self.ranks} shards {self.parameters:.0%} of the parameters{flops}{left}"


def coverage(model: nn.Module, styles: Styles, ranks: int, example: tuple[Any, Any] | None) -> Coverage:
    """Of the full model, before it is sharded."""
    flow = recorded(model, example[0]) if example is not None else None
    sharded = set(sharded_dims(model, styles))
    named = dict(model.named_parameters())
    total = sum(map(torch.numel, named.values()))
    covered = sum(parameter.numel() for name, parameter in named.items() if name in sharded)
    left = {
        name: sum(each.numel() for key, each in module.named_parameters(recurse=False) if _join(name, key) in named)
        for name, module in model.named_modules()
        if not any(_join(name, key) in sharded for key, _ in module.named_parameters(recurse=False))
    }
    largest = max(left, key=lambda name: left[name], default="")
    size = left.get(largest, 0)
    reason = _reason(largest, model, styles, ranks, flow) if size else ""
    return Coverage(
        ranks, covered / total if total else 0.0, _flops(flow, styles), largest or "the model", size, reason
    )


def _join(module: str, parameter: str) -> str:
    return f"{module}.{parameter}".lstrip(".")


def _flops(flow: Dataflow | None, styles: Styles) -> float | None:
    """Products outside of layers are sharded where all they work on comes from layers sharded by columns."""
    if flow is None:
        return None
    kinds = {name: style.kind for name, style in styles.items()}
    total = sum(flow.layer_flops.values()) + sum(flops for _, flops in flow.other_flops)
    sharded = sum(flops for name, flops in flow.layer_flops.items() if kinds.get(name) in _SHARDED)
    for origins, flops in flow.other_flops:
        layers = origins - {INPUT, TOKENS, PARAMETER}
        if layers and all(kinds.get(each) in _INSIDE for each in layers):
            sharded += flops
    return sharded / total if total else None


def _reason(name: str, model: nn.Module, styles: Styles, ranks: int, flow: Dataflow | None) -> str:
    module = model.get_submodule(name)
    if module in adapters.inner_modules(model):
        layers = (key for key, each in model.named_modules() if adapters.is_adapted_linear(each))
        layer = next(key for key in layers if name.startswith(f"{key}.".lstrip(".")))
        if layer in styles and styles[layer].kind != "replicate":
            return "the factor of an adapter that every rank needs in full"
        return _reason(layer, model, styles, ranks, flow)
    if name in styles and styles[name].kind == "replicate":
        return 'its rule is "replicate"'
    is_layer = isinstance(module, nn.Linear | nn.Embedding)
    if is_layer and flow is not None and _join(name, "weight") in flow.used_elsewhere:
        return f"{type(module).__name__} whose weight is used outside its own forward"
    if isinstance(module, nn.Embedding):
        if flow is not None and name in flow.sources and TOKENS not in flow.sources[name]:
            return "nn.Embedding whose rows are positions"
        option = vocabulary.option_beyond_lookup(module)
        if option:
            return f"nn.Embedding with {option}, which changes or reads its weight beyond looking rows up"
        return f"{type(module).__name__} without a rule"
    if is_linear(module):
        inputs, outputs = features(module)
        if inputs % ranks and outputs % ranks:
            return f"tp={ranks} divides neither its {inputs} inputs nor its {outputs} outputs"
        return f"{type(module).__name__} without a rule; give it one, such as column_gather"
    if is_convolution(module):
        return f"{type(module).__name__} that no trial could shard together with the layers that read its output"
    return f"no rule shards a {type(module).__name__}"
