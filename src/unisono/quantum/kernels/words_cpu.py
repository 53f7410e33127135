"""The inner loops of words.py in numba: a block of amplitudes at a time, all words of one flip while it is in cache.

Amplitudes are flat arrays of real and imaginary parts in turn. A sign is that of the block's place times that within
the block, which `low` has for each word."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from unisono.quantum.kernels.parity import parity

FEW = 6  # words up to which each is added up on its own

jit: Any = numba.njit(nogil=True, cache=True, fastmath=True, error_model="numpy")


@jit
def dot(left, right):  # type: ignore[no-untyped-def]
    total = left[0] * 0
    for place in range(len(left)):
        total += left[place] * right[place]
    return total


@jit
def transform(values):  # type: ignore[no-untyped-def]
    """values[mask] becomes the sum of values[i] * (-1)^popcount(i & mask): Walsh and Hadamard's transform."""
    step = len(values) // 2
    while step:
        for begin in range(0, len(values), 2 * step):
            for place in range(begin, begin + step):
                low, high = values[place], values[place + step]
                values[place] = low + high
                values[place + step] = low - high
        step //= 2


@jit
def sums(mine, theirs, flip, signs, low, begin, end, out):  # type: ignore[no-untyped-def]
    size = low.shape[1]
    inside = flip & (size - 1)
    real, imaginary = np.empty(size, mine.dtype), np.empty(size, mine.dtype)
    for block in range(begin, end):
        base = block * size
        other = base ^ (flip - inside)
        for place in range(size):
            i, j = 2 * (base + place), 2 * (other + (place ^ inside))
            real[place] = theirs[j] * mine[i] + theirs[j + 1] * mine[i + 1]
            imaginary[place] = theirs[j] * mine[i + 1] - theirs[j + 1] * mine[i]
        if len(signs) > FEW:
            transform(real)
            if flip:  # without a flip, products are real
                transform(imaginary)
        for word in range(len(signs)):
            if len(signs) > FEW:
                first, second = real[signs[word] & (size - 1)], imaginary[signs[word] & (size - 1)]
            else:
                first, second = dot(low[word], real), dot(low[word], imaginary)
            sign = 1.0 - 2.0 * parity(base & signs[word])
            out[word, 0] += sign * first
            out[word, 1] += sign * second


@jit
def add(into, theirs, flip, signs, factors, low, begin, end):  # type: ignore[no-untyped-def]
    size = low.shape[1]
    inside = flip & (size - 1)
    real, imaginary = np.empty(size, into.dtype), np.empty(size, into.dtype)
    for block in range(begin, end):
        base = block * size
        target = base ^ (flip - inside)
        real[:] = 0
        imaginary[:] = 0
        for word in range(len(signs)):
            row = low[word]
            negative = parity(base & signs[word])
            first = -factors[word, 0] if negative else factors[word, 0]
            second = -factors[word, 1] if negative else factors[word, 1]
            for place in range(size):
                real[place] += first * row[place]
                imaginary[place] += second * row[place]
        for place in range(size):
            i, j = 2 * (base + place), 2 * (target + (place ^ inside))
            into[j] += real[place] * theirs[i] - imaginary[place] * theirs[i + 1]
            into[j + 1] += real[place] * theirs[i + 1] + imaginary[place] * theirs[i]
