"""A program between its runs: its arrays in few bytes, unpacked into a workspace by a run that does not find it there.

A program repeats itself: layers are alike, tables are linear, records have the same few lengths. As differences to the
row before, or to the record before, in the narrowest integers that hold them, and deflated, its arrays take a twentieth
to a thirtieth of what the kernels read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.compile.angles import Angles, LinearAngles
from unisono.quantum.compile.assembly import Code

_WORTH = 1 << 14  # bytes; a smaller program is kept as it is: unpacking it would take longer than many a run of it
_APART = (1, 9, 12)  # a record of a phase has 6 numbers, and 3 for each of its guards and bits: one or two, mostly
_NARROW = (np.int8, np.int16, np.int32, np.int64)
_ARRAYS = (
    "sweeps", "ops", "rows", "pairs", "places", "constants", "constant_places",
    "terms", "term_constants", "term_slopes", "term_angles",
)  # fmt: skip

Form = tuple[tuple[int, ...], Any]  # shape and dtype of an array


@dataclass(frozen=True, slots=True)
class PackedArray:
    """An array: `kept` as it is, or its bytes deflated, those of unpacked numbers as differences of type `narrow`
    between rows that are `apart`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    kept: bytes | NDArray
    narrow: np.dtype
    apart: int = 0

    @classmethod
    def of(cls, array: NDArray, deflate: bool) -> PackedArray:
        if not deflate:
            return cls(array.shape, array.dtype, array.copy(), array.dtype)  # it may be part of a larger one
        if array.dtype.kind != "i":
            return cls(array.shape, array.dtype, _deflated(array), array.dtype)
        tried = []
        for apart in _APART if array.ndim == 1 else _APART[:1]:
            steps = array.copy()
            steps[apart:] -= array[:-apart]
            narrow = _narrowed(steps)
            tried.append(cls(array.shape, array.dtype, _deflated(narrow), narrow.dtype, apart))
        return min(tried, key=lambda packed: packed.nbytes)

    def unpack(self, out: NDArray) -> NDArray:
        if not isinstance(self.kept, bytes):
            out[...] = self.kept
            return out
        unpacked = zlib.decompress(self.kept, bufsize=max(1, out.size * self.narrow.itemsize))
        numbers = np.frombuffer(unpacked, self.narrow)
        if not self.apart:
            out[...] = numbers.reshape(self.shape)
            return out
        out[...] = numbers.reshape(self.shape[::-1]).T
        full = len(out) // self.apart * self.apart
        rows = out[:full].reshape(-1, self.apart, *self.shape[1:])
        np.cumsum(rows, axis=0, out=rows)
        if 0 < full < len(out):
            out[full:] += out[full - self.apart : len(out) - self.apart]
        return out

    @property
    def nbytes(self) -> int:
        return len(self.kept) if isinstance(self.kept, bytes) else self.kept.nbytes


class Packed:
    """`frame` is the program with empty arrays; `key` distinguishes it from all others, from copies too."""

    def __init__(self, code: Code) -> None:
        arrays = [*arrays_of(code)]
        deflate = sum(array.nbytes for array in arrays) > _WORTH
        self._arrays = tuple(PackedArray.of(array, deflate) for array in arrays)
        none: Any = np.zeros(0)
        empty: dict[str, Any] = dict.fromkeys(_ARRAYS, none)
        self.frame = replace(code, **empty, angles=Angles(none, *[LinearAngles(none, none, none)] * 2))
        self.key = object()

    def unpack(self, into: Sequence[NDArray] | None = None) -> Code:
        """The program, in given arrays of these `forms` or in its own."""
        into = [np.empty(*form) for form in self.forms] if into is None else into
        made = [packed.unpack(out) for packed, out in zip(self._arrays, into, strict=True)]
        arrays: dict[str, Any] = dict(zip(_ARRAYS, made, strict=False))
        constants, *terms = made[len(_ARRAYS) :]
        return replace(
            self.frame, **arrays, angles=Angles(constants, LinearAngles(*terms[:3]), LinearAngles(*terms[3:]))
        )

    @property
    def forms(self) -> list[Form]:
        """Of its arrays."""
        return [(packed.shape, packed.dtype) for packed in self._arrays]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[(*_ARRAYS, "angles").index(name)].shape

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for packed in self._arrays)


def _narrowed(steps: NDArray) -> NDArray:
    """Column by column, in the narrowest integers."""
    least, most = steps.min(initial=0), steps.max(initial=0)
    return steps.T.astype(next(kind for kind in _NARROW if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max))


def _deflated(array: NDArray) -> bytes:
    """In windows of 4 KiB: what usual ones would gain is less than the quarter of a megabyte that they take."""
    small = zlib.compressobj(9, wbits=12, memLevel=5)
    return small.compress(array.tobytes()) + small.flush()


def arrays_of(code: Code) -> Iterator[NDArray]:
    yield from (getattr(code, name) for name in _ARRAYS)
    yield code.angles.constants
    for terms in (code.angles.weights, code.angles.features):
        yield from (terms.at, terms.indices, terms.factors)
