"""Datasets: rows of named columns, from a generator or from arrays, in batches.

    dataset = ds.GeneratorDataset(generate, ["input", "label"])      # a function that yields rows, or something indexed
    dataset = ds.NumpySlicesDataset({"x": x, "y": y}).batch(32)

A row is a tuple of arrays. What is indexed is shuffled by default, as MindSpore's: in an order of the seed
(ms.set_seed) and the epoch, the same on every rank; `num_shards` and `shard_id` give a rank every num_shards-th sample
of it.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch

from unisono.compat.language import say
from unisono.compat.mindspore.common.seed import get_seed
from unisono.compat.mindspore.common.tensor import Tensor
from unisono.errors import UsageError

Row = tuple[Any, ...]


class Dataset(abc.ABC):
    """Rows, and what is done to them, in order."""

    def __init__(self, column_names: Sequence[str] | str | None) -> None:
        self.columns = [column_names] if isinstance(column_names, str) else list(column_names or ())
        self._steps: list[Callable[[Iterator[Row]], Iterator[Row]]] = []
        self._epoch = 0

    @abc.abstractmethod
    def rows(self) -> Iterator[Row]: ...

    def get_col_names(self) -> list[str]:
        return list(self.columns)

    def batch(self, batch_size: int, drop_remainder: bool = False, num_parallel_workers: int | None = None) -> Self:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(
                say(
                    f"batch({batch_size!r}): expected a whole number of at least 1",
                    f"batch({batch_size!r})：应为不小于 1 的整数",
                )
            )
        return self._then(lambda rows: _batches(rows, batch_size, drop_remainder))

    def repeat(self, count: int | None = None) -> Self:
        if count is None or count == -1:
            raise UsageError(
                say(
                    "repeat() has no end; expected how often, and Model.train(epoch) repeats by itself",
                    "repeat() 没有次数；请给出次数，Model.train(epoch) 自己会重复",
                )
            )
        made = self._then(lambda rows: rows)
        made._steps[-1] = lambda rows: _repeated(self, count)
        return made

    def shuffle(self, buffer_size: int) -> Self:
        return self._then(lambda rows: _shuffled(list(rows), self._generator()))

    def map(self, operations: Any, input_columns: Sequence[str] | str | None = None, **ignored: Any) -> Self:
        """Apply functions to the arrays of columns, by default of the first."""
        functions = operations if isinstance(operations, list | tuple) else [operations]
        names = [input_columns] if isinstance(input_columns, str) else list(input_columns or self.columns[:1])
        unknown = [name for name in names if name not in self.columns]
        if unknown:
            raise UsageError(
                say(
                    f"map(input_columns={names}): the columns are {', '.join(self.columns)}",
                    f"map(input_columns={names})：数据集的列为 {', '.join(self.columns)}",
                )
            )
        places = {self.columns.index(name) for name in names}

        def mapped(rows: Iterator[Row]) -> Iterator[Row]:
            for row in rows:
                yield tuple(_applied(functions, each) if i in places else each for i, each in enumerate(row))

        return self._then(mapped)

    def get_dataset_size(self) -> int:
        """Rows, or batches, of an epoch; counted by going through one."""
        epoch, size = self._epoch, sum(1 for _ in self)
        self._epoch = epoch
        return size

    def create_tuple_iterator(self, num_epochs: int = -1, output_numpy: bool = False) -> Iterator[list[Any]]:
        return ([each if output_numpy else Tensor(each) for each in row] for row in self)

    def create_dict_iterator(self, num_epochs: int = -1, output_numpy: bool = False) -> Iterator[dict[str, Any]]:
        for row in self:
            yield {name: each if output_numpy else Tensor(each) for name, each in zip(self.columns, row, strict=True)}

    def __iter__(self) -> Iterator[Row]:
        """The rows of the next epoch."""
        rows = self.rows()
        for step in self._steps:
            rows = step(rows)
        for row in rows:
            if len(row) != len(self.columns):
                raise UsageError(
                    say(
                        f"the dataset gives rows of {len(row)} arrays, but its columns are {self.columns}; "
                        "MindSpore refuses it too: name each of them",
                        f"数据集每行有 {len(row)} 个数组，而列为 {self.columns}；MindSpore 同样会报错：请为每"
                        "个数组命名",
                    )
                )
            yield row
        self._epoch += 1

    def _then(self, step: Callable[[Iterator[Row]], Iterator[Row]]) -> Self:
        made = copy.copy(self)
        made._steps = [*self._steps, step]
        return made

    def _generator(self) -> np.random.Generator:
        return np.random.default_rng([get_seed() or 0, self._epoch])


def _batches(rows: Iterator[Row], size: int, drop: bool) -> Iterator[Row]:
    held: list[Row] = []
    for row in rows:
        held.append(row)
        if len(held) == size:
            yield tuple(np.stack(column) for column in zip(*held, strict=True))
            held = []
    if held and not drop:
        yield tuple(np.stack(column) for column in zip(*held, strict=True))


def _repeated(dataset: Dataset, count: int) -> Iterator[Row]:
    for _ in range(count):
        yield from dataset


def _shuffled(rows: list[Row], generator: np.random.Generator) -> Iterator[Row]:
    return (rows[i] for i in generator.permutation(len(rows)))


def _applied(functions: Sequence[Callable[[Any], Any]], value: Any) -> np.ndarray:
    for function in functions:
        value = function(value)
    return _array(value)


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


class GeneratorDataset(Dataset):
    """Rows of a function that yields them, of anything with __getitem__ and __len__, or of an iterable."""

    def __init__(
        self,
        source: Any,
        column_names: Sequence[str] | str | None = None,
        column_types: Any = None,
        schema: Any = None,
        num_samples: int | None = None,
        num_parallel_workers: int = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        num_shards: int | None = None,
        shard_id: int | None = None,
        python_multiprocessing: bool = True,
        max_rowsize: int = 6,
    ) -> None:
        super().__init__(column_names)
        if not self.columns:
            raise UsageError(
                say(
                    'GeneratorDataset(source): its columns have no names; give some, as ["input", "label"]',
                    "GeneratorDataset(source)：没有列名；请给出，如 ['input', 'label']",
                )
            )
        if not callable(source) and not hasattr(source, "__getitem__") and not hasattr(source, "__iter__"):
            raise UsageError(
                say(
                    f"GeneratorDataset({source!r}): expected a function that yields rows, or rows themselves",
                    f"GeneratorDataset({source!r})：应为产生各行的函数，或各行本身",
                )
            )
        if sampler is not None or schema is not None:
            raise UsageError(
                say(
                    "GeneratorDataset(sampler=, schema=) are not here; let the source give the rows wanted",
                    "GeneratorDataset(sampler=, schema=)：这里没有；请让 source 给出所要的行",
                )
            )
        self.source = source
        self.num_samples = num_samples
        self._is_indexed = not callable(source) and hasattr(source, "__getitem__") and hasattr(source, "__len__")
        if shuffle and not self._is_indexed:
            raise UsageError(
                say(
                    "GeneratorDataset(shuffle=True): the source has no __getitem__; MindSpore refuses it too",
                    "GeneratorDataset(shuffle=True)：source 没有 __getitem__；MindSpore 同样会报错",
                )
            )
        self._shuffles = self._is_indexed if shuffle is None else shuffle
        if (num_shards is None) != (shard_id is None):
            raise UsageError(say("num_shards and shard_id are given together", "num_shards 和 shard_id 须同时给出"))
        self._shard = (shard_id or 0, num_shards or 1)

    def rows(self) -> Iterator[Row]:
        shard, shards = self._shard
        for number, row in enumerate(self._all()):
            if self.num_samples is not None and number >= self.num_samples * shards:
                return
            if number % shards == shard:
                yield tuple(_array(each) for each in (row if isinstance(row, tuple | list) else (row,)))

    def _all(self) -> Iterator[Any]:
        if not self._is_indexed:
            yield from self.source() if callable(self.source) else self.source
            return
        order: Any = range(len(self.source))
        if self._shuffles:
            order = self._generator().permutation(len(self.source))
        for i in order:
            yield self.source[int(i)]


class NumpySlicesDataset(GeneratorDataset):
    """Rows of arrays, along their first dims: a dict by column, a tuple, or one array."""

    def __init__(self, data: Any, column_names: Sequence[str] | str | None = None, **settings: Any) -> None:
        columns = list(data) if isinstance(data, dict) else None
        arrays = list(data.values()) if isinstance(data, dict) else list(data) if isinstance(data, tuple) else [data]
        arrays = [_array(each) for each in arrays]
        lengths = {len(each) for each in arrays}
        if len(lengths) != 1:
            raise UsageError(
                say(
                    f"NumpySlicesDataset: arrays of {sorted(lengths)} samples; expected as many in each",
                    f"NumpySlicesDataset：各数组的样本数为 {sorted(lengths)}；应当相同",
                )
            )
        names = column_names or columns or [f"column_{i}" for i in range(len(arrays))]
        super().__init__(_Slices(arrays), names, **settings)


class _Slices:
    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> Row:
        return tuple(array[index] for array in self._arrays)
