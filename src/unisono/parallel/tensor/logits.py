"""Logits that stay sharded: a head sharded by columns whose output is gathered only where full logits are needed.

A head gives each rank its shard of the vocabulary's logits. A loss need not gather them (see `vocabulary`), but the
user's loss is written for full logits. So within `in_shards()` the head returns a LogitsShard: to its reader a
tensor of the full shape, which reshapes and slices as one, and of which F.cross_entropy is taken shard by shard. Any
other function is given full logits, gathered on the spot: slower, never wrong.

An autograd.Function (a model's own, or that of a module's backward hook) would compute the gradient of full logits
for what is a shard: in the block Function.apply is given full logits.

Code that reads a tensor past torch's Python functions would see the shard; whether a loss does is tried on one sample.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.mesh.interception import function_arguments
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.layout import Split
from unisono.parallel.tensor.parameter_shards import TP, lengths_of
from unisono.parallel.tensor.vocabulary import vocab_parallel_cross_entropy
from unisono.torch_compat import no_torch_function_subclass

_is_wanted = False
_heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that may give shards
_GATHERED = "unisono_gathered"
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

_ATTRIBUTES = ("dtype", "device", "ndim", "requires_grad", "grad_fn", "is_cuda", "layout")
_AS_THEY_ARE = {  # what is the same of a shard and of full logits
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    torch.is_floating_point,
    torch.Tensor.new_zeros,
    torch.Tensor.new_empty,
}
_BY_ELEMENT = {
    torch.Tensor.detach,
    torch.Tensor.clone,
    torch.Tensor.contiguous,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.to,
    torch.Tensor.requires_grad_,
}


@contextlib.contextmanager
def in_shards(wanted: bool = True) -> Iterator[None]:
    """In the block, heads give shards: what reads their output is a loss."""
    global _is_wanted
    before, _is_wanted = _is_wanted, wanted
    try:
        with function_arguments(full_of_shard) if wanted and len(_heads) else contextlib.nullcontext():
            yield
    finally:
        _is_wanted = before


def keep_in_shards(head: nn.Module, vocabulary: int, comm: Communicator) -> None:
    """Make a layer that gives this rank's logits give a LogitsShard where that is wanted, else all logits."""
    lengths = lengths_of(Split.even(TP, 0, vocabulary, comm.size))

    def leave(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if _is_wanted:
            return _shard(output, comm, lengths)
        return autograd_collectives.gather(output, -1, lengths, comm)

    head.register_forward_hook(leave)
    _heads.add(head)


class LogitsShard(torch.Tensor):
    """This rank's shard of logits (..., vocabulary), which looks like full logits."""

    comm: Communicator
    lengths: list[int]  # of all ranks' shards

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with no_torch_function_subclass():
            first = args[0] if args else kwargs.get("input")
            if isinstance(first, LogitsShard):
                taken, result = _taken(func, first, args[1:], kwargs)
                if taken:
                    return result
            args, kwargs = tree_map(full_of_shard, (tuple(args), kwargs))
            return func(*args, **kwargs)


def full_of_shard(leaf: Any) -> Any:
    """The full logits of a LogitsShard, from all ranks; anything else as it is. Gathered once for all readers."""
    if not isinstance(leaf, LogitsShard):
        return leaf
    with no_torch_function_subclass():
        now = (leaf._version, torch.is_grad_enabled())
        before, full = getattr(leaf, _GATHERED, (None, None))
        if full is None or before != now:
            full = autograd_collectives.gather(leaf.as_subclass(torch.Tensor), -1, leaf.lengths, leaf.comm)
            setattr(leaf, _GATHERED, (now, full))
        return full


def _shard(raw: torch.Tensor, comm: Communicator, lengths: list[int]) -> LogitsShard:
    shard = raw.as_subclass(LogitsShard)
    shard.comm, shard.lengths = comm, lengths
    return shard


def _taken(
    func: Callable[..., Any], shard: LogitsShard, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """What a function gives of a shard alone, if that is known; the torch functions here see plain tensors."""
    raw = shard.as_subclass(torch.Tensor)
    shape = torch.Size((*raw.shape[:-1], sum(shard.lengths)))
    if func == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
        return True, shape
    if func is torch.Tensor.register_hook:
        return True, func(shard, *args, **kwargs)  # full logits, gathered for the hook, would get no gradient
    if func is torch.Tensor.data_ptr:
        raise UsageError("a shard of the logits was asked for its address, as if it were the full tensor")
    if func is torch.Tensor.size:
        return True, shape[args[0]] if args else shape
    if func in (torch.Tensor.numel, torch.numel):
        return True, shape.numel()
    if func in _AS_THEY_ARE:
        return True, func(raw, *args, **kwargs)
    if func is F.cross_entropy:
        return _cross_entropy(shard, raw, *args, **kwargs)
    reshaped = _reshaped(func, raw, shape, args, kwargs)
    return reshaped is not None, reshaped if reshaped is None else _shard(reshaped, shard.comm, shard.lengths)


def _cross_entropy(
    shard: LogitsShard,
    raw: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[bool, Any]:
    is_plain = weight is None and size_average is None and reduce is None and not target.is_floating_point()
    if raw.dim() != 2 or not is_plain:
        return False, None
    classes = sum(shard.lengths)
    return True, vocab_parallel_cross_entropy(
        raw, target, shard.comm, ignore_index, label_smoothing, reduction, vocabulary=classes
    )


def _reshaped(
    func: Callable[..., Any], raw: torch.Tensor, shape: torch.Size, args: Sequence[Any], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """What changes other dims than the last, or elements one by one, and so does the same to a shard."""
    last = raw.dim() - 1
    if func in _BY_ELEMENT:
        return func(raw, *args, **kwargs)
    if func is torch.Tensor.narrow and len(args) == 3 and args[0] % raw.dim() != last:
        return func(raw, *args)
    if func in (torch.Tensor.flatten, torch.flatten) and len(args) == 2 and not kwargs and args[1] % raw.dim() != last:
        return func(raw, *args)
    if func in (torch.Tensor.view, torch.Tensor.reshape) and args and not kwargs:
        sizes = args[0] if isinstance(args[0], tuple | list) else args
        if all(isinstance(size, int) for size in sizes) and len(sizes) > 1 and sizes[-1] == shape[-1]:
            return func(raw, (*sizes[:-1], raw.shape[-1]))
    if func is torch.Tensor.__getitem__ and _spares_last(args[0], raw.dim()):
        return func(raw, *args)
    return None


def _spares_last(index: Any, dims: int) -> bool:
    """Whether an index leaves the last dim as it is."""
    words = index if isinstance(index, tuple) else (index,)
    if any(word is None or not isinstance(word, int | slice | type(Ellipsis)) for word in words):
        return False
    if Ellipsis in words and words[-1] is not Ellipsis:
        return words[-1] == slice(None)
    return len(words) < dims or words[-1] in (Ellipsis, slice(None))


class Proof:
    """Whether a loss gives for shards what it gives for full logits: tried once, on one sample."""

    def __init__(self, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        self._loss = loss
        self._holds: bool | None = None

    def fitting(self, outputs: Any, targets: Any) -> Any:
        """The outputs as the loss may have them."""
        shards = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, LogitsShard)]
        if not shards:
            return outputs
        if self._holds is None and shards[0].comm.is_simulated:
            self._holds = True  # nothing to try it with; where it does not hold is rare
        if self._holds is None and shards[0].shape[0]:
            self._holds = self._tried(outputs, targets, shards[0])
        return tree_map(full_of_shard, outputs) if self._holds is False else outputs

    @torch.no_grad()
    def _tried(self, outputs: Any, targets: Any, shard: LogitsShard) -> bool:
        batch_size = shard.shape[0]

        def first(leaf: Any) -> Any:
            is_of_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch_size
            return leaf[:1] if is_of_batch else leaf

        sample, target = tree_map(first, outputs), tree_map(first, targets)
        own = inspect.unwrap(self._loss)
        try:
            with no_side_effects(own):  # a loss may count its calls
                expected = self._loss(tree_map(full_of_shard, sample), target)
            with no_side_effects(own):
                got = self._loss(sample, target)
            near = torch.allclose(got, expected, rtol=_TOLERANCE.get(got.dtype, 2e-2), atol=1e-6, equal_nan=True)
        except Exception:  # it reached past the shard; or fails on full logits too, as will be reported there
            near = False
        agreed = shard.comm.all_reduce(torch.tensor([float(near)], device=shard.comm.device), "min")
        return bool(agreed.item())
