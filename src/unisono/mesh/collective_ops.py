"""Collectives as ops of torch, for graphs that are traced: what autograd_collectives computes in a compiled region.

Ops take the size of a communicator beside its number: inductor's cache holds graphs of other jobs, in which the same
number may stand for more ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from unisono.comm.communicator import Communicator

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")


class Numbered(Generic[T]):
    """Objects by number, for graphs, which can refer to nothing else. Each lives as long as others keep it; numbers,
    from 1, are not given again."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, thing: T) -> int:
        number = next(self._next)
        self._objects[number] = thing
        return number

    def __getitem__(self, number: int) -> T:
        return self._objects[number]

    def get(self, number: int) -> T | None:
        return self._objects.get(number)

    def __len__(self) -> int:
        return len(self._objects)


EAGER_ONLY: list[Callable[..., Any]] = []  # functions that Dynamo must not trace
_comms: Numbered[Communicator] = Numbered()
_number_of: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def eager_only(function: Function) -> Function:
    """A decorator: in a region that is compiled, Dynamo fails at the function, and the region runs eagerly."""
    EAGER_ONLY.append(function)
    return function


def number_of(comm: Communicator) -> int:
    """The number by which a graph refers to a communicator, in this process."""
    if comm not in _number_of:
        _number_of[comm] = _comms.add(comm)
    return _number_of[comm]


@torch.library.custom_op("unisono::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, comm: int) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    _comms[comm].all_reduce(total)
    return total


@all_reduce.register_fake
def _(x: torch.Tensor, comm: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("unisono::all_gather_rows", mutates_args=())
def all_gather_rows(x: torch.Tensor, comm: int, size: int) -> torch.Tensor:
    """Along dim 0, of equally many rows of every rank."""
    joined = x.new_empty(size * x.shape[0], *x.shape[1:])
    _comms[comm].all_gather_into(joined, x.contiguous())
    return joined


@all_gather_rows.register_fake
def _(x: torch.Tensor, comm: int, size: int) -> torch.Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


@torch.library.custom_op("unisono::reduce_scatter_rows", mutates_args=())
def reduce_scatter_rows(x: torch.Tensor, comm: int, size: int) -> torch.Tensor:
    """Along dim 0, in equal parts."""
    result: torch.Tensor = _comms[comm].reduce_scatter(x.contiguous())
    return result


@reduce_scatter_rows.register_fake
def _(x: torch.Tensor, comm: int, size: int) -> torch.Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:])
