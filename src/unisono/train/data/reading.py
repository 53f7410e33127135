"""Reads samples and collates batches, with random numbers that depend on the sample.

Before a sample is read, the generators of Python, NumPy and torch are seeded with (seed, epoch, sample), and before a
batch is collated with (seed, epoch, batch). The random numbers of an augmentation, or of masks, therefore depend
neither on the rank, nor on the worker, nor on earlier samples; afterwards the generators of the process are restored.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from unisono.errors import UsageError
from unisono.parallel.inputs import as_inputs, as_pair
from unisono.parallel.layout import Split
from unisono.parallel.share import BatchDim, batch_size_of, batch_slice, dims_of, first_batch_size, inputs_dim
from unisono.train.data.sampler import seed_from

Collate = Callable[[list[Any]], Any]


def collate_samples(samples: list[Any]) -> Any:
    """torch's default_collate, but lists of numbers in samples that are dicts are tensors, as in transformers."""
    if isinstance(samples[0], Mapping):
        samples = [{name: _tensor(value) for name, value in sample.items()} for sample in samples]
    return default_collate(samples)


def collated(samples: list[Any], collate: Collate) -> Any:
    """UsageError where `collate_samples` cannot make a batch of them."""
    try:
        return collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        if collate is not collate_samples:
            raise
        raise UsageError(
            f"samples of this dataset cannot be collated: {str(error).splitlines()[0]}; give them equal shapes, "
            "or a function that pads them as collate= of uni.Engine or uni.Loader, as transformers' "
            "DataCollatorWithPadding(tokenizer)"
        ) from None


def _tensor(value: Any) -> Any:
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if not isinstance(value, list) or not isinstance(first, Number | list):  # a list of tensors or arrays stays one
        return value
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):  # None among numbers, or rows of different lengths
        return value


class Request(NamedTuple):
    """One global batch, and the samples of it to read here."""

    epoch: int
    start: int  # of the batch in the epoch's order
    stop: int
    samples: list[int]  # to read
    batch_size: int  # in the resulting batch; fewer than samples only if the rank has none of the batch


@dataclass(frozen=True)
class Batcher:
    """Selects this rank's part of a batch and collates it."""

    part: tuple[int, int]
    collate: Collate
    global_batches: bool
    pairs: bool
    batch_dim: BatchDim = 0

    def held(self, batch_size: int) -> range:
        """The samples of a batch of so many that are read here."""
        if self.global_batches:
            return range(batch_size)
        index, count = self.part
        held = Split.even((), 0, batch_size, count).held[index]
        assert isinstance(held, range)
        return held

    def batch(self, samples: list[Any], batch_size: int) -> Any:
        return self.checked(collated(samples, self.collate), batch_size)

    def checked(self, made: Any, batch_size: int) -> Any:
        """Validate a collated batch; as a pair if one is expected, with its first samples."""
        if self.pairs:
            made = as_pair(made)
            if not isinstance(made, list | tuple) or len(made) != 2:
                shown = f"{len(made)} items" if isinstance(made, list | tuple) else type(made).__name__
                raise UsageError(
                    f"a batch of this dataset is {shown}; expected (inputs, targets): let the dataset return such "
                    "pairs, or use uni.Loader(dataset, batch_size, collate=...) to make them from a list of samples"
                )
            made = (as_inputs(made[0]), made[1])
        if self.collate is collate_samples:
            made = self._arranged(made)
        found = first_batch_size(made, self.dim) if self.part[1] == 1 else batch_size_of(made, self.dim)
        if found not in (batch_size, 1):
            raise UsageError(f"collate returned a batch of {found} samples for {batch_size}; expected as many")
        if not batch_size:  # a rank without samples: the batch of one, which a Loader makes the spare
            return made
        return made if found == batch_size else batch_slice(made, 0, batch_size, self.dim)

    @property
    def dim(self) -> BatchDim:
        """The batch dim of what is made here."""
        return self.batch_dim if self.pairs else inputs_dim(self.batch_dim)

    def _arranged(self, made: Any) -> Any:
        """Move the samples from dim 0 to batch_dim."""
        leaves, spec = tree_flatten(made)
        dims = dims_of(made, self.dim)
        moved = [leaf.movedim(0, dim) if dim else leaf for leaf, dim in zip(leaves, dims, strict=True)]
        return tree_unflatten(moved, spec)


class BatchDataset(Dataset[Any]):
    """A dataset of batches: reader[request] is the batch."""

    def __init__(self, data: Any, batcher: Batcher, seed: int) -> None:
        self.data, self.batcher, self.seed = data, batcher, seed

    def __getitem__(self, request: Request) -> Any:
        if type(self.data) is TensorDataset and self.batcher.collate is collate_samples:
            indices = torch.as_tensor(request.samples)
            return self.batcher.checked(
                [tensor[indices.to(tensor.device)] for tensor in self.data.tensors], request.batch_size
            )
        with preserved_generators():
            samples = []
            for sample in request.samples:
                seed_generators(self.seed, request.epoch, sample)
                samples.append(self.data[sample])
            seed_generators(self.seed, request.epoch, "batch", request.start)  # a collate may draw: masks of tokens
            return self.batcher.batch(samples, request.batch_size)


class BatchStream(IterableDataset[tuple[Request, Any]]):
    """The rest of an epoch of an iterable dataset in batches, from a position on."""

    def __init__(self, data: Any, batcher: Batcher, seed: int, batch_size: int, drop_last: bool) -> None:
        self.data, self.batcher, self.seed = data, batcher, seed
        self.batch_size, self.drop_last = batch_size, drop_last
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[tuple[Request, Any]]:
        position, stream = 0, self._samples()
        start, samples = self.position, []
        for sample in stream:
            position += 1
            if position <= start:
                continue
            samples.append(sample)
            if len(samples) == self.batch_size:
                yield self._batch(start, samples)
                start, samples = position, []
        if samples and not self.drop_last:
            yield self._batch(start, samples)

    def _samples(self) -> Iterator[Any]:
        with preserved_generators():
            seed_generators(self.seed, self.epoch, "start")
            if hasattr(self.data, "set_epoch"):
                self.data.set_epoch(self.epoch)
            stream = iter(self.data)
        position = 0
        while True:
            with preserved_generators():
                seed_generators(self.seed, self.epoch, position)
                try:
                    sample = next(stream)
                except StopIteration:
                    return
            position += 1
            yield sample

    def _batch(self, start: int, samples: list[Any]) -> tuple[Request, Any]:
        batch_size = len(samples)
        held = self.batcher.held(batch_size)
        request = Request(self.epoch, start, start + batch_size, [], len(held))
        with preserved_generators():
            seed_generators(self.seed, self.epoch, "batch", start)
            return request, self.batcher.batch(samples[held.start : held.stop] or samples[:1], len(held))


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators of the process after the block."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def seed_generators(*identity: object) -> None:
    number = seed_from("sample", *identity)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)


def is_iterable_only(data: Any) -> bool:
    return isinstance(data, IterableDataset) or (isinstance(data, Iterable) and not hasattr(data, "__getitem__"))
