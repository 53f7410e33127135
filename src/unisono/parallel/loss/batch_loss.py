"""Losses that compare the samples of a batch with each other: InfoNCE, CLIP, SigLIP, batch statistics.

    trainer = uni.parallelize(model, plan, loss=uni.BatchLoss(contrastive), ...)

Such a loss is not a sum over samples, so every data rank must see all of them: the outputs are gathered from all ranks,
and each rank evaluates the full loss L. With N ranks each contributes L / N, and the gradient of the gather sums what
all ranks have for a rank's own samples:

    sum over ranks of d(L / N)/d(outputs of rank r)  =  dL/d(outputs of rank r)

which also holds for parameters that are used after the gather (a temperature). Targets are gathered too.

A model may compare samples itself, as CLIP of Hugging Face does in text_embeds @ image_embeds.t(): the factors of a
product of that form, (samples, width) x (width, samples), are gathered before it (`GatheredProducts`), so that what
follows, `outputs.loss` included, is that of the full batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.parallel.inputs import call
from unisono.parallel.loss.loss import GlobalLoss, Loss, name_of
from unisono.parallel.loss.model_loss import BatchDependence, on_two_sizes
from unisono.parallel.pipeline.dependence import Dependence, Touch, storages_of
from unisono.parallel.share import batch_size_of
from unisono.parallel.tensor.logits import full_of_shard
from unisono.plan.plan import Plan

_PRODUCTS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}


class BatchLoss:
    """A loss that needs all samples of the global batch at once; see batch_loss.py.

    Args:
        loss: loss(outputs, targets) gives a scalar.
    """

    def __init__(self, loss: Loss) -> None:
        if not callable(loss):
            raise UsageError(f"BatchLoss was given {type(loss).__name__}; expected a function loss(outputs, targets)")
        self.loss = self.__wrapped__ = loss
        self.__name__ = name_of(loss)

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        return self.loss(outputs, targets)


class GatheredLoss(GlobalLoss):
    """The loss of the full batch on every rank, of which each contributes an equal share."""

    def __init__(self, loss: BatchLoss, comm: Communicator | None) -> None:
        super().__init__(loss, comm)
        self.outputs: OutputKinds | None = None
        self.lengths: list[int] = []  # samples of each rank

    def prepare(self, microbatches: Sequence[tuple[Any, Any]], full: tuple[Any, Any] | None = None) -> None:
        self.settle()
        self._sum = None
        assert len(microbatches) == 1, "plans with microbatches are refused before"

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        if self.ranks == 1:
            return self._evaluated(outputs, targets)
        assert self._comm is not None
        assert self.outputs is not None
        gathered = self.outputs.gathered(tree_map(full_of_shard, outputs), self.lengths, self._comm)
        targets = tree_map(self._all_targets, targets)
        return self._evaluated(gathered, targets) / self.ranks

    def _all_targets(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return leaf
        assert self._comm is not None
        return torch.cat(self._comm.all_gather(leaf.contiguous(), uneven=True))

    def products(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """The scope of a forward."""
        if self.ranks == 1 or self._comm is None:
            return contextlib.nullcontext()
        comm, lengths = self._comm, self.lengths
        return GatheredProducts(
            model, lengths[comm.rank], lambda x, dim: autograd_collectives.gather_to_use(x, dim, lengths, comm)
        )


class GatheredProducts(TorchFunctionMode):
    """While active, products of samples with samples are of all ranks' samples."""

    def __init__(self, model: nn.Module, batch_size: int, gather: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self._parameters = {storage for parameter in model.parameters() for storage in storages_of(parameter)}
        self._batch_size = batch_size
        self._gather = gather

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and len(args) == 2 and not kwargs and self._is_of_samples(*args):
            return func(self._gather(args[0], 0), self._gather(args[1], 1))
        return func(*args, **(kwargs or {}))

    def _is_of_samples(self, left: Any, right: Any) -> bool:
        if not all(isinstance(each, torch.Tensor) and each.dim() == 2 for each in (left, right)):
            return False
        is_of_samples = left.shape[0] == self._batch_size and right.shape[1] == self._batch_size
        return is_of_samples and self._parameters.isdisjoint(storages_of((left, right)))


@dataclass
class OutputKinds:
    """Of a model's outputs, leaf by leaf: whether it has a row a sample and the loss reads it."""

    is_gathered: list[bool]

    def gathered(self, outputs: Any, lengths: list[int], comm: Communicator) -> Any:
        leaves, spec = tree_flatten(outputs)
        if len(leaves) != len(self.is_gathered):
            raise UsageError(
                f"the model returned {len(leaves)} values, but {len(self.is_gathered)} on the example; with "
                "uni.BatchLoss it must return the same for every batch"
            )
        for number, leaf in enumerate(leaves):
            if self.is_gathered[number]:
                leaves[number] = _gathered(leaf, lengths, comm)
        return tree_unflatten(leaves, spec)

    @classmethod
    def of(cls, model: nn.Module, loss: BatchLoss, example: tuple[Any, Any]) -> OutputKinds:
        """From runs of the plain model on two numbers of samples; may raise NeedsValues.

        UsageError where an output that the loss reads is made of all samples of a part of the batch."""
        if batch_size_of(example) < 2:
            raise UsageError("uni.BatchLoss needs an example of two samples or more, to see which outputs have samples")
        large, small, batch_size = on_two_sizes(
            model, example, lambda model, batch: _BatchLossTrial(model, loss, batch)
        )
        return cls([large.is_gathered(number, small, batch_size) for number in range(len(large.leaves))])


class _BatchLossTrial:
    """A run of the plain model on a few samples."""

    def __init__(self, model: nn.Module, loss: BatchLoss, example: tuple[Any, Any]) -> None:
        inputs, targets = example
        self._batch, self._compared = BatchDependence(), Dependence()
        self._batch.mark(inputs)

        def compared(factor: torch.Tensor, dim: int) -> torch.Tensor:
            factor = factor.clone()
            self._compared.mark(factor)
            return factor

        with torch.no_grad(), self._batch, self._compared, GatheredProducts(model, batch_size_of(inputs), compared):
            outputs = call(model, inputs)
        self.leaves = tree_flatten_with_path(outputs)[0]
        self._read: set[StorageWeakRef] | None = set()
        try:
            with torch.no_grad(), Touch(self._read.add):
                loss(outputs, targets)
        except Exception:
            self._read = None  # not known

    def is_gathered(self, number: int, small: _BatchLossTrial, batch_size: int) -> bool:
        path, leaf = self.leaves[number]
        other = small.leaves[number][1]
        if not isinstance(leaf, torch.Tensor) or leaf in self._compared or leaf not in self._batch:
            return False
        if self._read is not None and self._read.isdisjoint(storages_of(leaf)):
            return False
        shape, less = tuple(leaf.shape), tuple(other.shape)
        if shape and shape[0] == batch_size and less[0] == batch_size - 1 and shape[1:] == less[1:]:
            return True
        raise UsageError(
            f"the model's output{keystr(path)} is of shape {list(shape)} for {batch_size} samples, made of all samples "
            "of a part of the batch; with uni.BatchLoss the loss takes outputs with a row a sample, or products "
            "(samples, width) @ (width, samples) of them: return the embeddings and compare them in the loss"
        )


def _gathered(leaf: torch.Tensor, lengths: list[int], comm: Communicator) -> torch.Tensor:
    if leaf.requires_grad:
        return autograd_collectives.gather_to_use(leaf, 0, lengths, comm)
    return torch.cat(comm.all_gather(leaf.contiguous(), uneven=True))


def require_full_batches(plan: Plan, example: Any) -> None:
    """UsageError where a plan never has all samples at once."""
    if plan.microbatches > 1:
        raise UsageError(
            f"uni.BatchLoss with microbatches={plan.microbatches}: the loss needs all samples of the batch at once; "
            "use microbatches=1, with recompute=full or more data ranks where memory is short"
        )
    if plan.cp > 1:
        raise UsageError(f"uni.BatchLoss with cp={plan.cp}: not supported together; use dp, tp or ZeRO instead of cp")
    if plan.dp > 1 and example is None:
        raise UsageError("uni.BatchLoss needs an example batch to see which outputs have samples; pass example=")
