"""The operations of a circuit, in order, which its schedule and its program share."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from unisono.quantum.circuit.growable import CHUNK, ChunkedList
from unisono.quantum.circuit.operation import Operation


class Operations(Sequence[Operation]):
    """Like a tuple, but in chunks."""

    __slots__ = ("_chunks",)

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        left = iter(operations)
        lists = iter(lambda: list(itertools.islice(left, CHUNK)), [])  # a tuple would outgrow a chunk on its way
        self._chunks = tuple(map(tuple, lists))

    @overload
    def __getitem__(self, which: int) -> Operation: ...
    @overload
    def __getitem__(self, which: slice) -> tuple[Operation, ...]: ...
    def __getitem__(self, which: int | slice) -> Operation | tuple[Operation, ...]:
        if isinstance(which, slice):
            return tuple(self)[which]
        index = range(len(self))[which]
        return self._chunks[index // CHUNK][index % CHUNK]

    def __len__(self) -> int:
        return CHUNK * (len(self._chunks) - 1) + len(self._chunks[-1]) if self._chunks else 0

    def __iter__(self) -> Iterator[Operation]:
        return itertools.chain.from_iterable(self._chunks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Operations):
            return self._chunks == other._chunks
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Operations({list(self)})"


def shared(made: Sequence[Operation] | ChunkedList[Operation], given: Sequence[Operation]) -> Operations:
    """The operations made of those given; they are the given ones where nothing was changed, for a circuit, its
    schedule and its program may have thousands of operations, and be kept together."""
    same = isinstance(given, Operations) and len(made) == len(given) and all(map(operator.is_, made, given))
    return given if same else Operations(made)  # type: ignore[return-value]
