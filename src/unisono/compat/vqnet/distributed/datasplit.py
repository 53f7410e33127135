"""Data sharded over ranks."""

from __future__ import annotations

from typing import Any

from unisono.compat.language import say
from unisono.compat.vqnet.distributed.joining import joined_if_many
from unisono.errors import UsageError
from unisono.train.data import partitioner


def split_data(x_train: Any, y_train: Any, shuffle: bool = False) -> tuple[Any, Any]:
    """This rank's part of samples and labels; parts differ by one sample at most, and none is left out.

    Shuffled, samples are in the same new order on all ranks before they are sharded.
    """
    for name, given in (("x_train", x_train), ("y_train", y_train)):
        if not hasattr(given, "__getitem__") or getattr(given, "ndim", 1) == 0:
            raise UsageError(
                say(
                    f"split_data: {name} is {given!r}; expected an array, a tensor or a list",
                    f"split_data：{name} 为 {given!r}；应为数组、张量或列表",
                )
            )
    joined_if_many()
    return partitioner.split_data(x_train, y_train, shuffle)
