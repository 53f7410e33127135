"""Loader: global batches, of which each rank reads its part.

    loader = uni.Loader(dataset, batch_size=64, part=trainer.part, seed=1, workers=4)
    while loader.epoch < epochs:
        for batch in loader:                  # the rest of this epoch
            loss = trainer.step(batch)
    state = loader.state_dict()               # a loader of another plan can continue after the last batch

`batch_size` is global. The samples of a batch, their order and the random numbers of augmentations depend on (seed,
epoch) only: not on the plan, the number of ranks or the number of workers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate

from unisono.errors import UsageError
from unisono.parallel.share import BatchDim, Share, batch_slice, require_batch_dim
from unisono.train.data.dataset_sample import fingerprint, warn_of_other_data
from unisono.train.data.reading import (
    BatchDataset,
    Batcher,
    BatchStream,
    Collate,
    Request,
    collate_samples,
    is_iterable_only,
)
from unisono.train.data.sample_order import COMPUTED_ABOVE, SampleOrder, order
from unisono.train.data.sampler import require_part, require_whole_number


class Loader:
    """Batches of (inputs, targets) for `Trainer.step`; iterating yields the rest of the epoch, then starts the next.

    Args:
        dataset: Map-style, with a length and indices, or an iterable of samples, whose order is kept (at most one
            worker; each rank reads all samples).
        batch_size: Samples of a global batch.
        part: (index, count) of the rank, `trainer.part`.
        shuffle: Default for map-style datasets.
        seed: Of the order.
        drop_last: Drop the last batch of an epoch if it is smaller.
        workers: Processes that read samples.
        collate: Makes a batch from a list of samples.
        global_batches: Whether ranks read and collate full batches, of which the trainer takes its part; default with a
            custom collate, since one that pads needs all samples of a batch.
        pairs: False allows batches that are not (inputs, targets), for predictions.
        device: Where batches are put.
        pin_memory: Whether they are copied there from pinned memory.
        batch_dim: The dim of samples in a batch; a custom collate must put them there.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        part: tuple[int, int] = (0, 1),
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
        collate: Collate | None = None,
        global_batches: bool | None = None,
        pairs: bool = True,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        batch_dim: BatchDim = 0,
    ) -> None:
        self.dataset = dataset
        require_batch_dim(batch_dim)
        self.batch_size = require_whole_number("batch_size", batch_size, 1)
        self.seed = require_whole_number("seed", seed, 0)
        self.workers = require_whole_number("workers", workers, 0)
        self.drop_last, self.device, self.pin_memory = drop_last, device, pin_memory
        self.samples = _samples_of(dataset)
        if self.samples is None and shuffle:
            raise UsageError("shuffle=True for an iterable dataset, which has its own order; shuffle within it")
        if self.samples is not None and drop_last and self.samples < batch_size:
            raise UsageError(
                f"{self.samples} samples with batch_size={batch_size} and drop_last=True leave no batch; "
                "use a smaller batch_size"
            )
        self.shuffle = self.samples is not None if shuffle is None else shuffle
        global_batches = collate is not None if global_batches is None else global_batches
        if collate is None or collate is default_collate:
            collate = collate_samples
        self._batcher = Batcher(require_part(part), collate, global_batches, pairs, batch_dim)
        self.epoch = 0
        self.position = 0  # in the epoch's order, in samples of all ranks
        self._last: Request | None = None
        self._order: tuple[int, SampleOrder] | None = None
        self._is_computed = self.samples is not None and self.samples > COMPUTED_ABOVE
        self._sampled: tuple[str | None, ...] = ()  # the dataset's fingerprint, once it was asked for

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        if self.samples is None:
            raise UsageError("an iterable dataset has no number of batches")
        full, rest = divmod(self.samples, self.batch_size)
        return full + bool(rest and not self.drop_last)

    def batches_left(self, epochs: int) -> int | None:
        """Batches from the current position to the end of so many epochs; None if unknown."""
        if self.samples is None:
            return None
        if self.epoch >= epochs:
            return 0
        full, rest = divmod(self.samples - self.position, self.batch_size)
        return full + bool(rest and not self.drop_last) + len(self) * (epochs - self.epoch - 1)

    def first(self, global_batches: bool = False) -> Any:
        """The next batch, without advancing the loader; None if there is none.

        global_batches: with the samples of all ranks.
        """
        ahead = copy.copy(self)
        ahead.workers = 0
        if global_batches:
            ahead._batcher = replace(self._batcher, part=(0, 1))
        return next(iter(ahead), None)

    @property
    def smallest_batch(self) -> int | None:
        """Samples in the smallest batch of an epoch; None if unknown."""
        if self.samples is None:
            return None
        rest = self.samples % self.batch_size
        return min(self.samples, self.batch_size if self.drop_last else rest or self.batch_size)

    @property
    def ids(self) -> list[int]:
        """Indices in the dataset of the samples of the last batch, on all ranks together."""
        if self._last is None:
            return []
        run = range(self._last.start, self._last.stop)
        return list(run) if self.samples is None else self._ordered(self._last.epoch)[run.start : run.stop].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Start that epoch from its first sample."""
        self.epoch, self.position = require_whole_number("epoch", epoch, 0), 0

    def __iter__(self) -> Iterator[Any]:
        for request, batch in self._batches():
            self.position, self._last = request.stop, request
            if self.device is not None:
                batch = tree_map(self._to_device, batch)
            if self._batcher.global_batches:
                yield batch
            else:
                batch_size = request.stop - request.start
                held, spare = self._batcher.held(batch_size), None
                if not len(held):
                    batch, spare = batch_slice(batch, 0, 0, self._batcher.dim), batch
                yield Share(batch, held, batch_size, spare)
        self.epoch, self.position = self.epoch + 1, 0

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self.device, non_blocking=self.pin_memory) if isinstance(leaf, torch.Tensor) else leaf

    # ---- reading -------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[Request, Any]]:
        if self.samples is None:
            stream = BatchStream(self.dataset, self._batcher, self.seed, self.batch_size, self.drop_last)
            stream.epoch, stream.position = self.epoch, self.position
            return iter(stream) if not self.workers else iter(self._loader(stream, None, workers=1))
        reader = BatchDataset(self.dataset, self._batcher, self.seed)
        requests = self._requests(self.epoch, self.position)
        if not self.workers:
            return ((request, reader[request]) for request in requests)
        return zip(requests, self._loader(reader, self._requests(self.epoch, self.position), self.workers), strict=True)

    def _requests(self, epoch: int, position: int) -> Iterator[Request]:
        assert self.samples is not None
        taken = self._ordered(epoch)
        for start in range(position, self.samples, self.batch_size):
            stop = min(start + self.batch_size, self.samples)
            if self.drop_last and stop - start < self.batch_size:
                return
            held = self._batcher.held(stop - start)
            # A rank without samples of this batch reads one, to build an empty batch of the right structure.
            mine = taken[start:stop][held.start : held.stop] if len(held) else taken[start : start + 1]
            yield Request(epoch, start, stop, mine.tolist(), len(held))

    def _ordered(self, epoch: int) -> SampleOrder:
        if self._order is None or self._order[0] != epoch:
            assert self.samples is not None
            self._order = epoch, order(self.samples, self.seed, epoch, self.shuffle, is_computed=self._is_computed)
        return self._order[1]

    def _loader(self, data: Any, requests: Iterator[Request] | None, workers: int) -> DataLoader[Any]:
        return DataLoader(
            data,
            batch_size=None,
            sampler=requests,
            num_workers=workers,
            collate_fn=_identity,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # so that starting workers does not advance the default generator
        )

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch; JSON serialisable."""
        epoch, position = self.epoch, self.position
        if self.samples is not None and position + (self.batch_size if self.drop_last else 1) > self.samples:
            epoch, position = epoch + 1, 0
        return {
            "epoch": epoch,
            "position": position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": self.samples,
            "order": "computed" if self._is_computed else "sorted",
            "fingerprint": self._fingerprint(),
        }

    def _fingerprint(self) -> str | None:
        if not self._sampled:
            self._sampled = (fingerprint(self.dataset),)
        return self._sampled[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there: no sample is repeated or skipped. Plan, workers and batch_size may differ."""
        for key, mine in (("samples", self.samples), ("shuffle", self.shuffle)):
            if state[key] != mine:
                raise UsageError(
                    f"the saved state of the data has {key}={state[key]}, but this loader has {key}={mine}; "
                    "is it another dataset?"
                )
        warn_of_other_data(state.get("fingerprint"), self.dataset)
        self.seed = state["seed"]
        self.epoch, self.position = state["epoch"], state["position"]
        self._is_computed = state.get("order") == "computed"  # older states: of any size, sorted
        self._last, self._order = None, None


def _samples_of(dataset: Any) -> int | None:
    """Number of samples; None for an iterable dataset."""
    _require_samples(dataset)
    if is_iterable_only(dataset):
        return None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"a dataset of type {type(dataset).__name__}; expected one with __len__ and __getitem__ (a torch "
            "Dataset, a list), or an iterable of samples"
        )
    if not len(dataset):
        raise UsageError("the dataset is empty; expected at least one sample")
    return len(dataset)


def _require_samples(dataset: Any) -> None:
    """UsageError for objects that are easily mistaken for a dataset."""
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "a DataLoader as a dataset, whose items are batches; give its dataset (loader.dataset) and the global "
            "batch_size: batches are made here, the same for every number of ranks"
        )
    if isinstance(dataset, Iterator):
        raise UsageError(
            f"a {type(dataset).__name__} as a dataset, which can be read only once; expected a dataset that can be "
            "read in every epoch and after a resume: a list, a torch Dataset, an IterableDataset"
        )
    if isinstance(dataset, Mapping) and any(hasattr(each, "column_names") for each in dataset.values()):
        raise UsageError(
            f"a {type(dataset).__name__} with the splits {', '.join(map(str, dataset))} as a dataset; give one of "
            f"them, as dataset[{next(iter(dataset))!r}]"
        )
    if isinstance(dataset, Mapping):
        raise UsageError("a dict as a dataset; expected a torch Dataset or a list of (inputs, targets)")
    if isinstance(dataset, tuple) and dataset and all(isinstance(each, torch.Tensor) for each in dataset):
        raise UsageError(
            f"a tuple of {len(dataset)} tensors as a dataset; expected samples: "
            "torch.utils.data.TensorDataset(inputs, targets)"
        )


def _identity(batch: Any) -> Any:
    return batch
