"""Outputs of the parts of a batch, put together again: what one device would have given for the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.context import Context

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def joined(parts: Sequence[Any], rows: Sequence[int], comm: Communicator) -> Any:
    """`parts` are this rank's outputs for its microbatches of `rows` samples; `comm` joins the data ranks.

    Every tensor must have a row a sample. What is no tensor must not depend on the samples: the first is taken.
    """
    if len(parts) == 1 and comm.size == 1:
        return parts[0]
    # A part may look right by chance: so that no rank waits for one that refuses, all hear what each has found.
    wrong = next(filter(None, comm.all_gather_object(_fault(parts, rows))), None)
    if wrong:
        raise UsageError(f"predict: {wrong}")
    flat = [tree_flatten(part) for part in parts]
    leaves, spec = flat[0]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            mine = torch.cat([each[place] for each, _ in flat])
            leaves[place] = torch.cat(comm.all_gather(mine.contiguous(), uneven=True)) if comm.size > 1 else mine
    return tree_unflatten(leaves, spec)


def _fault(parts: Sequence[Any], rows: Sequence[int]) -> str:
    """Why outputs cannot be joined; empty where they can."""
    if any(tree_flatten(part)[1] != tree_flatten(parts[0])[1] for part in parts):
        return "the structure of the model's output differs between microbatches"
    for part, count in zip(parts, rows, strict=True):
        for path, leaf in tree_flatten_with_path(part)[0]:
            if isinstance(leaf, torch.Tensor) and (not leaf.ndim or leaf.shape[0] != count):
                return (
                    f"the model's output{keystr(path)} is of shape {tuple(leaf.shape)} for {count} samples; to join "
                    "the outputs of all ranks and microbatches, each must have a row a sample"
                )
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                return (
                    f"the model's output{keystr(path)} is a {type(leaf).__name__}, which cannot be joined from the "
                    "parts of a batch; have the model leave it out (Hugging Face: use_cache=False)"
                )
    return ""


def with_whole_sequences(outputs: Any, context: Context | None) -> Any:
    """Outputs of this rank's tokens become those of all "cp" ranks' tokens."""
    if context is None or context.comm.size == 1 or context.is_whole:
        return outputs
    count = context.tokens(context.length).count(context.comm.rank)
    return _mapped(outputs, lambda leaf: _whole(leaf, count, context))


def _whole(leaf: torch.Tensor, count: int, context: Context) -> torch.Tensor:
    if leaf.ndim < 2 or leaf.shape[1] != count:
        return leaf
    return context.join(leaf, context.length)


def _mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
