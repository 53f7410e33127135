"""The sum of squares of many numbers at the speed of memory: the norm is checked after every exchange."""

from __future__ import annotations

from unisono.quantum.kernels.compiling import entry
from unisono.quantum.kernels.vector import add, fma, load, sub, total, width

PIECE = 1 << 14  # numbers that are added up in their own precision
LEAST = 64  # a run's length is a multiple of this


@entry()
def squares(numbers, begin, run, stride, count):  # type: ignore[no-untyped-def]
    """Of `count` runs of a flat array, `stride` apart from the first, which begins at `begin`."""
    w = width(numbers)
    found = 0.0
    for number in range(count):
        start = begin + number * stride
        for piece in range(start, start + run, PIECE):
            first = load(numbers, piece)
            a = b = c = d = sub(first, first)
            for i in range(piece, min(piece + PIECE, start + run), 4 * w):
                p, q, r, s = load(numbers, i), load(numbers, i + w), load(numbers, i + 2 * w), load(numbers, i + 3 * w)
                a, b, c, d = fma(p, p, a), fma(q, q, b), fma(r, r, c), fma(s, s, d)
            found += total(add(add(a, b), add(c, d)))
    return found
