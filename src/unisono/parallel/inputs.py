"""The inputs of a model as a user gives them: one tensor, a tuple of arguments, or a dict of named ones; and outputs in
dataclasses, which torch looks into once it knows them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map


def as_inputs(inputs: Any) -> Any:
    """A mapping of named inputs, as Hugging Face's BatchEncoding, as a dict."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def as_pair(batch: Any) -> Any:
    """A batch as (inputs, targets). One that is a mapping, as Hugging Face's collators make, is the model's named
    inputs with the labels among them: the model computes the loss itself, and there are no targets."""
    return (dict(batch), None) if isinstance(batch, Mapping) else batch


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        outputs = model(**inputs)
    else:
        outputs = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    register_dataclasses(outputs)
    return outputs


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """In the block, a Hugging Face model returns no cache of keys and values, which is for generation only."""
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    configs = [config for config in found.values() if getattr(config, "use_cache", None) is True]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def register_dataclasses(outputs: Any) -> None:
    """Have torch.utils._pytree look into the dataclasses among a model's outputs, and into those within them."""
    kinds = {type(leaf) for leaf in tree_leaves(outputs) if not isinstance(leaf, torch.Tensor)}
    found = [kind for kind in kinds if dataclasses.is_dataclass(kind) and all(f.init for f in dataclasses.fields(kind))]
    for kind in found:
        register_dataclass(kind)
    if found:
        register_dataclasses(outputs)


def cloned(batch: Any) -> Any:
    """A batch for a trial run: what a model writes to its inputs does not reach the user's tensors."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
