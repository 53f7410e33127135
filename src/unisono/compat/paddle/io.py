"""paddle.io: datasets, samplers and DataLoader, over torch's DataLoader.

Random numbers that a dataset draws from NumPy follow the seed of `paddle.seed`, the epoch and the data rank: ranks that
read the same samples, along mp and pp, draw the same ones. Without worker processes that holds for programs that have
not used NumPy's generator themselves; where they have, it goes on as they left it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from unisono.compat.language import say
from unisono.compat.paddle.distributed.environment import data_index, data_ranks
from unisono.compat.paddle.paddle_names import missing_names
from unisono.compat.paddle.tensor import common_seed, plain, wrapped
from unisono.errors import UsageError
from unisono.train.data.sampler import seed_from

_loaders = itertools.count()


class Dataset(torch.utils.data.Dataset[Any]):
    """Samples by number: a class of one's own has __getitem__ and __len__."""


class IterableDataset(torch.utils.data.IterableDataset[Any]):
    """Samples one after the other: a class of one's own has __iter__."""


class TensorDataset(Dataset):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = [plain(each) for each in tensors]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(each[index] for each in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])


def _batches(indices: Iterable[int], batch_size: int, drop_last: bool) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in indices:
        batch.append(index)
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch and not drop_last:
        yield batch


def _require_batch_size(name: str, batch_size: Any) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise UsageError(
            say(
                f"{name}(batch_size={batch_size!r}): Paddle needs a whole number of at least 1, and so does unisono",
                f"{name}(batch_size={batch_size!r})：与飞桨相同，应为不小于 1 的整数",
            )
        )
    return int(batch_size)


class BatchSampler:
    """Lists of sample numbers, the same on every rank."""

    def __init__(
        self,
        dataset: Any = None,
        sampler: Iterable[int] | None = None,
        shuffle: bool = False,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if dataset is None and sampler is None:
            raise UsageError(
                say(
                    "BatchSampler() without dataset and sampler: as in Paddle, give one of them",
                    "BatchSampler() 没有给出 dataset 或 sampler：与飞桨相同，请给出其中之一",
                )
            )
        self.dataset, self.sampler, self.shuffle, self.drop_last = dataset, sampler, shuffle, drop_last
        self.batch_size = _require_batch_size("BatchSampler", batch_size)
        self._epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        if self.sampler is not None:
            indices: Iterable[int] = self.sampler
        else:
            order = np.arange(len(self.dataset))
            if self.shuffle:
                np.random.RandomState(seed_from(common_seed(), self._epoch) % 2**32).shuffle(order)
                self._epoch += 1
            indices = order.tolist()
        return _batches(indices, self.batch_size, self.drop_last)

    def __len__(self) -> int:
        count = len(self.dataset) if self.sampler is None else len(self.sampler)  # type: ignore[arg-type]
        return count // self.batch_size if self.drop_last else math.ceil(count / self.batch_size)


class DistributedBatchSampler(BatchSampler):
    """A data rank's lists of sample numbers: of each run of num_replicas * batch_size samples, rank r has the r-th
    batch_size. The last ones are shared evenly, after the first samples have been added to make that possible.

    Without num_replicas there is one part for each data rank of the strategy. Ranks that hold parts of one model, along
    mp and pp, are one data rank and read the same samples, as their result is that of one device.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, None, shuffle, batch_size, drop_last)
        self.nranks = data_ranks() if num_replicas is None else _require_batch_size("num_replicas", num_replicas)
        self.local_rank = data_index(rank) if num_replicas is None or rank is None else rank
        if not 0 <= self.local_rank < self.nranks:
            raise UsageError(
                say(
                    f"DistributedBatchSampler(rank={rank}, num_replicas={num_replicas}): as in Paddle, rank is 0 to "
                    f"{self.nranks - 1}",
                    f"DistributedBatchSampler(rank={rank}, num_replicas={num_replicas})：与飞桨相同，rank 应在 0 到 "
                    f"{self.nranks - 1} 之间",
                )
            )
        self.num_samples = math.ceil(len(dataset) / self.nranks)
        self.total_size = self.num_samples * self.nranks
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(len(self.dataset))
        order = np.resize(order, self.total_size)  # from the first one on again
        if self.shuffle:
            np.random.RandomState(self.epoch).shuffle(order)
            self.epoch += 1
        stride = self.batch_size * self.nranks
        even = self.total_size - self.total_size % stride
        runs = order[:even].reshape(-1, self.nranks, self.batch_size)[:, self.local_rank].reshape(-1)
        rest = order[even:].reshape(self.nranks, -1)[self.local_rank]
        return _batches(np.concatenate([runs, rest]).tolist(), self.batch_size, self.drop_last)

    def __len__(self) -> int:
        count = self.num_samples
        return count // self.batch_size if self.drop_last else math.ceil(count / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def default_collate_fn(samples: list[Any]) -> Any:
    """A batch of samples: arrays, numbers and tensors are stacked, field by field."""
    first = samples[0]
    if isinstance(first, tuple | list):
        return [default_collate_fn(list(field)) for field in zip(*samples, strict=True)]
    if isinstance(first, dict):
        return {key: default_collate_fn([sample[key] for sample in samples]) for key in first}
    if isinstance(first, torch.Tensor):
        return torch.stack([plain(sample) for sample in samples])
    if isinstance(first, str | bytes):
        return samples
    return torch.from_numpy(np.stack([np.asarray(sample) for sample in samples]))


_UNTOUCHED = np.random.get_state()


def _is_same_state(one: Any, other: Any) -> bool:
    return bool(one[2] == other[2] and np.array_equal(one[1], other[1]))


def _read_with(seed: int, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, read with numbers of NumPy's generator from a seed; its own state stays as it is."""
    state = np.random.RandomState(seed % 2**32).get_state()
    while True:
        outside = np.random.get_state()
        np.random.set_state(state)
        try:
            batch = next(batches, None)
        finally:
            state = np.random.get_state()
            np.random.set_state(outside)
        if batch is None:
            return
        yield batch


class DataLoader:
    """Batches, as lists of Tensors; called, it is iterated too. Arguments about places and memory are taken, and a
    rank's own device is used."""

    def __init__(
        self,
        dataset: Any,
        feed_list: Any = None,
        places: Any = None,
        return_list: bool = True,
        batch_sampler: Any = None,
        batch_size: int | None = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        use_buffer_reader: bool = True,
        prefetch_factor: int = 2,
        use_shared_memory: bool = True,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        persistent_workers: bool = False,
    ) -> None:
        if batch_sampler is None and not isinstance(dataset, torch.utils.data.IterableDataset):
            batch_sampler = BatchSampler(dataset, None, shuffle, batch_size or 1, drop_last)
        self.dataset, self.batch_sampler = dataset, batch_sampler
        self._part = batch_sampler.local_rank if isinstance(batch_sampler, DistributedBatchSampler) else 0
        self._number, self._epoch = next(_loaders), 0
        self._generator = torch.Generator()
        workers: dict[str, Any] = {"num_workers": num_workers, "timeout": timeout, "worker_init_fn": worker_init_fn}
        if num_workers:
            workers |= {"prefetch_factor": prefetch_factor, "multiprocessing_context": "fork"}
            workers["persistent_workers"] = persistent_workers
        kind: dict[str, Any] = {"batch_sampler": batch_sampler}
        if batch_sampler is None:
            kind = {"batch_size": batch_size, "drop_last": drop_last}
        self._loader = torch.utils.data.DataLoader(
            dataset, collate_fn=collate_fn or default_collate_fn, generator=self._generator, **kind, **workers
        )

    def __iter__(self) -> Iterator[Any]:
        seed = seed_from(common_seed(), self._number, self._epoch, self._part)
        self._generator.manual_seed(seed)
        self._epoch += 1
        if self._loader.num_workers == 0 and _is_same_state(np.random.get_state(), _UNTOUCHED):
            return (wrapped(batch) for batch in _read_with(seed, iter(self._loader)))
        return (wrapped(batch) for batch in self._loader)

    __call__ = __iter__

    def __len__(self) -> int:
        return len(self._loader)


__getattr__ = missing_names(__name__)
