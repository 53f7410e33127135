"""Outputs of the parts of a batch, put together again: what one device would have given for the full batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.random.state import SampleDim
from unisono.parallel.context.context import Context
from unisono.parallel.layout import layout_of
from unisono.parallel.share import samples_between

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def joined(
    parts: Sequence[Any],
    batch_sizes: Sequence[int],
    comm: Communicator,
    output_dims: Sequence[SampleDim | None],
    may_lack_samples: bool = False,
) -> Any:
    """`parts` are this rank's outputs for its microbatches, of `batch_sizes` samples; `comm` joins the data ranks.

    output_dims: where samples are in each leaf; one that is made of all samples (dim=None) is refused. Of what is no
    tensor, and with `may_lack_samples` of tensors without samples, the first is taken: they must not depend on the
    samples.
    """
    if len(parts) == 1 and comm.size == 1:
        return parts[0]
    # A part may look right by chance: so that no rank waits for one that refuses, all hear what each has found.
    fault = _fault(parts, batch_sizes, output_dims, may_lack_samples)
    wrong = next(filter(None, comm.all_gather_object(fault, only_data=True)), None)
    if wrong:
        raise UsageError(f"predict: {wrong}")
    flat = [tree_flatten(part) for part in parts]
    leaves, spec = flat[0]
    for index, (leaf, where) in enumerate(zip(leaves, output_dims, strict=True)):
        if isinstance(leaf, torch.Tensor) and where is not None and (dim := where.dim) is not None:
            mine = torch.cat([each[index] for each, _ in flat], dim)
            if comm.size > 1:
                everyone = comm.all_gather(mine.movedim(dim, 0).contiguous(), uneven=True)
                mine = torch.cat(everyone).movedim(0, dim)
            leaves[index] = mine
    return tree_unflatten(leaves, spec)


def _fault(
    parts: Sequence[Any], batch_sizes: Sequence[int], output_dims: Sequence[SampleDim | None], may_lack_samples: bool
) -> str:
    """Why outputs cannot be joined; empty where they can."""
    if any(tree_flatten(part)[1] != tree_flatten(parts[0])[1] for part in parts):
        return "the structure of the model's output differs between microbatches"
    for part, count in zip(parts, batch_sizes, strict=True):
        for (path, leaf), where in zip(tree_flatten_with_path(part)[0], output_dims, strict=True):
            dim = None if where is None else where.dim
            if isinstance(leaf, torch.Tensor) and where is not None and dim is None:
                return (
                    f"the model's output{keystr(path)} of shape {tuple(leaf.shape)} is made of all samples of a batch, "
                    "of which a rank or a microbatch has some only; have the model return values for each sample and "
                    "put them together after predict, or use dp=1 and microbatches=1"
                )
            if isinstance(leaf, torch.Tensor) and dim is None and may_lack_samples:
                continue
            if isinstance(leaf, torch.Tensor) and (dim is None or leaf.shape[dim] != count):
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


def with_full_sequences(outputs: Any, context: Context | None) -> Any:
    """Outputs of this rank's tokens become those of all "cp" ranks' tokens."""
    if context is None or context.comm.size == 1 or context.is_full:
        return outputs
    count = context.tokens(context.length).count(context.comm.rank)
    return _mapped(outputs, lambda leaf: _full(leaf, count, context))


def _full(leaf: torch.Tensor, count: int, context: Context) -> torch.Tensor:
    if leaf.ndim < 2 or leaf.shape[1] != count:
        return leaf
    return context.join(leaf, context.length)


def _mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def with_batch_size(outputs: Any, output_dims: Sequence[SampleDim | None], batch_size: int, wanted: int) -> Any:
    """Outputs as they will be for another number of samples; for their shapes only."""
    if batch_size == wanted:
        return outputs
    leaves, spec = tree_flatten(outputs)

    def resized(leaf: Any, where: SampleDim | None) -> Any:
        if where is None or where.dim is None or leaf.shape[where.dim] % max(batch_size, 1):
            return leaf
        shape = list(leaf.shape)
        # Outputs for no sample do not show how many rows one has: most have one.
        shape[where.dim] = shape[where.dim] // batch_size * wanted if batch_size else wanted
        return leaf.new_zeros(()).expand(shape)

    return tree_unflatten([resized(leaf, where) for leaf, where in zip(leaves, output_dims, strict=True)], spec)


def without_samples(outputs: Any, output_dims: Sequence[SampleDim | None]) -> Any:
    """Of the outputs for one sample, what those for none would be; gradients of zero go through it."""
    leaves, spec = tree_flatten(outputs)
    pairs = zip(leaves, output_dims, strict=True)
    return tree_unflatten([samples_between(leaf, dim, 1, 0, 0) for leaf, dim in pairs], spec)


def require_full_parameters(outputs: Any, are_gathered: bool) -> None:
    """are_gathered: for a forward pass only, by zero=3."""
    if not any(isinstance(leaf, nn.Parameter) for leaf in tree_flatten(outputs)[0]):
        return
    for path, leaf in tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, nn.Parameter) and (are_gathered or layout_of(leaf).splits):
            raise UsageError(
                f"the model's output{keystr(path)} is one of its parameters, of which a rank has a shard under this "
                "plan; under zero=3 return a copy of it (parameter.clone()), else leave it out, or use tp=1 and zero=2"
            )


def zero_of(outputs: Any) -> torch.Tensor:
    """A loss of nothing, that a backward can run from."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.sum() * 0 for leaf in leaves]).sum()
