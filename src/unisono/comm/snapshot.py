"""A snapshot of where a tensor lies, which can be compared with the tensor without a word to torch.

Note: why. Right after a megabyte has been moved the caches are cold, and the first question to a tensor, whichever it
is, takes four to seven microseconds: a tenth of the whole operation. So the bytes of torch's own records are compared:
which tensor the Python object stands for, that tensor's sizes, strides and storage, and that storage's memory. What the
bytes mean is not used, only whether they have changed; where that does not find every kind of change (`_finds_changes`
tries them all), torch is asked instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

_HEAD = object.__basicsize__  # bytes of a Python object before its own
_COUNTS = 16  # bytes of a C++ record that change without meaning: its class and its count of references
_OBJECT, _TENSOR, _STORAGE = 16, 160, 48  # bytes that are compared


class Snapshot:
    """How a tensor lay in memory when the snapshot was taken. Valid while the Python object lives."""

    __slots__ = ("_object", "_object_was", "_storage", "_storage_was", "_tensor", "_tensor_was")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._object = _words(id(tensor) + _HEAD, _OBJECT)
        self._tensor = _words(tensor._cdata + _COUNTS, _TENSOR)
        self._storage = _words(tensor.untyped_storage()._cdata + _COUNTS, _STORAGE)
        self._object_was, self._tensor_was, self._storage_was = map(_copy, (self._object, self._tensor, self._storage))

    def is_true(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor, the same Python object, still lies as it did."""
        # In this order: each record is known to be there still once the one before it has not changed.
        return (
            self._object == self._object_was and self._tensor == self._tensor_was and self._storage == self._storage_was
        )


class Questions:
    """The same, by asking torch."""

    __slots__ = ("_address", "_count")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._count = tensor.data_ptr(), tensor.numel()

    def is_true(self, tensor: torch.Tensor) -> bool:
        return self._address == tensor.data_ptr() and self._count == tensor.numel() and tensor.is_contiguous()


def take(tensor: torch.Tensor) -> Snapshot | Questions:
    """A snapshot of a tensor that is contiguous, on the CPU."""
    return Snapshot(tensor) if _finds_changes() else Questions(tensor)


@cache
def _finds_changes() -> bool:
    """Whether a Snapshot notices whatever can happen to a tensor with this build of torch, and nothing else."""
    return all(_finds(change) for change in _CHANGES) and not any(_finds(use) for use in _USES)


def _finds(change: Callable[[torch.Tensor, torch.Tensor], object]) -> bool:
    tensor, other = torch.ones(4, 6), torch.ones(4, 6)
    taken = Snapshot(tensor)
    change(tensor, other)
    return not taken.is_true(tensor)


_CHANGES: tuple[Callable[[torch.Tensor, torch.Tensor], object], ...] = (
    lambda x, _: x.t_(),
    lambda x, _: x.resize_(2, 6),
    lambda x, _: x.resize_(4, 60),
    lambda x, _: x.unsqueeze_(0),
    lambda x, _: x.as_strided_((4, 6), (1, 4)),
    lambda x, other: x.set_(other),  # type: ignore[call-overload]
    lambda x, other: setattr(x, "data", other),
    lambda x, _: setattr(x, "data", x.data[1:]),
    lambda x, _: setattr(x, "data", x.data[:3]),
    lambda x, _: setattr(x, "data", x.double()),
    lambda x, _: x.untyped_storage().resize_(960),
    lambda x, other: torch.utils.swap_tensors(x, other),
)
_USES: tuple[Callable[[torch.Tensor, torch.Tensor], object], ...] = (
    lambda x, _: x.add_(1),
    lambda x, _: x.view(-1).mul_(2),
    lambda x, _: x[1:].zero_(),
    lambda x, other: x.copy_(other),
    lambda x, _: x.data_ptr(),
)


def _words(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_uint64 * (length // 8)).from_address(address)).cast("B").cast("Q")


def _copy(words: memoryview) -> memoryview:
    return memoryview(bytes(words)).cast("Q")
