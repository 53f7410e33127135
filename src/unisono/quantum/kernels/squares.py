"""The sum of squares of many numbers at the speed of memory: the norm is checked after every exchange."""

from __future__ import annotations

from unisono.quantum.kernels.compiling import entry
from unisono.quantum.kernels.vector import add, fma, load, sub, total, width

PIECE = 1 << 14  # numbers that are added up in their own precision


@entry()
def squares(numbers):  # type: ignore[no-untyped-def]
    """Of a flat array whose length is a multiple of PIECE."""
    w = width(numbers)
    found = 0.0
    for begin in range(0, len(numbers), PIECE):
        first = load(numbers, begin)
        a = b = c = d = sub(first, first)
        for i in range(begin, begin + PIECE, 4 * w):
            p, q, r, s = load(numbers, i), load(numbers, i + w), load(numbers, i + 2 * w), load(numbers, i + 3 * w)
            a, b, c, d = fma(p, p, a), fma(q, q, b), fma(r, r, c), fma(s, s, d)
        found += total(add(add(a, b), add(c, d)))
    return found
