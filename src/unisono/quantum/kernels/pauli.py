"""Sums of Pauli words on one array of amplitudes: their values, and what they make of the state.

A word sends amplitude i ^ x to i with a factor c (-1)^popcount(i & z). Words with one x are a group: one pass over the
amplitudes multiplies by the sum of their factors. The factor is built a block of 2^BLOCK amplitudes at a time: words
whose z lies within the block give the same table for every block, the others are signs times tables.
"""

from __future__ import annotations

import numpy as np
from unisono.quantum.kernels.compiling import entry, inner
from unisono.quantum.kernels.parity import parity
from unisono.quantum.kernels.vector import fetch_add

BLOCK = 10


@inner(fastmath=True)
def _factor(re, im, group, begin, end, high, fixed, signs, factors, tables, places):  # type: ignore[no-untyped-def]
    """The factor of a group, for the block whose index begins with `high`."""
    for i in range(len(re)):
        re[i] = fixed[group, 0, i]
        im[i] = fixed[group, 1, i]
    for term in range(begin, end):
        place = places[term]
        if place < 0:
            continue
        sign = 1 - 2 * parity(signs[term] & high)
        a, b = sign * factors[term, 0], sign * factors[term, 1]
        table = tables[place]
        if place == 0:
            for i in range(len(re)):
                re[i] += a
                im[i] += b
        else:
            for i in range(len(re)):
                re[i] += a * table[i]
                im[i] += b * table[i]


@entry(fastmath=True)
def apply_words(state, costate, flips, starts, signs, factors, fixed, tables, places, re, im, values, counters):  # type: ignore[no-untyped-def]
    """Add each group's part of <state|O|state> to `values`; write O|state> to `costate` unless that is empty.

    Arrays of amplitudes are flat, parts interleaved. Group g has terms starts[g] to starts[g + 1]. `places[t]` is the
    row of `tables` for term t (row 0: all ones), or -1 where the term is in `fixed`. Threads share `counters`."""
    size = len(re)
    write = len(costate) > 0
    zero = re[0] - re[0]
    while True:
        high = fetch_add(counters, 0, 1) * size
        if 2 * high >= len(state):
            break
        if write:
            costate[2 * high : 2 * (high + size)] = zero
        for group in range(len(flips)):
            _factor(re, im, group, starts[group], starts[group + 1], high, fixed, signs, factors, tables, places)
            low = flips[group] & (size - 1)
            other = high ^ (flips[group] & ~(size - 1))
            total = zero
            for i in range(size):
                j = 2 * (other + (i ^ low))
                k = 2 * (high + i)
                a, b = state[j], state[j + 1]
                c, d = re[i] * a - im[i] * b, re[i] * b + im[i] * a
                total += state[k] * c + state[k + 1] * d
                if write:
                    costate[k] += c
                    costate[k + 1] += d
            values[group] += np.float64(total)
