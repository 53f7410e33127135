"""Batches as a program sees them: their shapes decide which of its graphs runs, and whether one was traced for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from unisono.errors import UsageError

Signature = tuple[Any, ...]


def signature(kind: str, batch: Any) -> Signature:
    """Equal for batches that the same graph serves."""
    leaves, spec = pytree.tree_flatten(batch)
    signature = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return kind, spec, signature


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Those of a batch, in full; every rank calls it, as some may be on a mesh."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]


def require_pair(batch: Any) -> None:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UsageError(f"the batch is {_shown(batch)}; expected (inputs, targets), as the example was")


def require_alike(batch: Any, example: Any) -> None:
    """A batch may have other sizes than the example (it is traced again), but not other tensors."""
    leaves, spec = pytree.tree_flatten(batch)
    known, known_spec = pytree.tree_flatten(example)
    if spec != known_spec:
        raise UsageError(f"the batch is {_shown(batch)}; expected the form of the example, {_shown(example)}")
    for leaf, reference in zip(leaves, known, strict=True):
        is_tensor = isinstance(leaf, torch.Tensor) and isinstance(reference, torch.Tensor)
        same = (leaf.dtype, leaf.dim()) == (reference.dtype, reference.dim()) if is_tensor else leaf == reference
        if not same:
            raise UsageError(
                f"the batch has {_shown(leaf)} where the example has {_shown(reference)}; sizes may differ, "
                "but not dtypes, numbers of dims or other values: make another program for such batches"
            )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_shown, value)) + ")"
    return repr(value)
