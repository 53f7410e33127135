"""The inner loops of pauli_strings.py in numba: a block of amplitudes at a time, all Pauli strings while it is in
cache.

Amplitudes are flat arrays of real and imaginary parts in turn. Group g has Pauli strings starts[g] to starts[g + 1],
which flip flips[g]. A sign is that of the block's place times that within the block, which tables have. Threads share
`counters`, from which each takes its next block; each has two arrays of a block's size to work in."""

from __future__ import annotations

from unisono.quantum.kernels.compiling import entry, inner
from unisono.quantum.kernels.vector import fetch_add, parity

FEW = 6  # Pauli strings of a group up to which each is added up on its own


@inner(fastmath=True)
def dot(left, right):  # type: ignore[no-untyped-def]
    total = left[0] * 0
    for place in range(len(left)):
        total += left[place] * right[place]
    return total


@inner(fastmath=True)
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


@entry(fastmath=True)
def sums(mine, theirs, alike, flips, starts, signs, low, out, real, imaginary, counters):  # type: ignore[no-untyped-def]
    """out[Pauli string] += the sum over i of conj(theirs[i ^ flip]) * mine[i] * (-1)^popcount(i & sign).

    `alike`: both arrays are the same, so that products without a flip are real."""
    size = low.shape[1]
    while True:
        base = fetch_add(counters, 0, 1) * size
        if 2 * base >= len(mine):
            break
        for group in range(len(flips)):
            inside = flips[group] & (size - 1)
            other = base ^ (flips[group] - inside)
            for place in range(size):
                i, j = 2 * (base + place), 2 * (other + (place ^ inside))
                real[place] = theirs[j] * mine[i] + theirs[j + 1] * mine[i + 1]
                imaginary[place] = theirs[j] * mine[i + 1] - theirs[j + 1] * mine[i]
            many = starts[group + 1] - starts[group] > FEW
            if many:
                transform(real)
                if flips[group] or not alike:
                    transform(imaginary)
            for pauli_string in range(starts[group], starts[group + 1]):
                if many:
                    first, second = real[signs[pauli_string] & (size - 1)], imaginary[signs[pauli_string] & (size - 1)]
                else:
                    first, second = dot(low[pauli_string], real), dot(low[pauli_string], imaginary)
                sign = 1.0 - 2.0 * parity(base & signs[pauli_string])
                out[pauli_string, 0] += sign * first
                out[pauli_string, 1] += sign * second


@inner(fastmath=True)
def _factor(re, im, group, begin, end, base, fixed, signs, factors, tables, places):  # type: ignore[no-untyped-def]
    """The factor of a group, for the block that begins at `base`."""
    for i in range(len(re)):
        re[i] = fixed[group, 0, i]
        im[i] = fixed[group, 1, i]
    for pauli_string in range(begin, end):
        place = places[pauli_string]
        if place < 0:
            continue
        sign = 1 - 2 * parity(signs[pauli_string] & base)
        a, b = sign * factors[pauli_string, 0], sign * factors[pauli_string, 1]
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
def add(into, theirs, flips, starts, signs, factors, fixed, tables, places, re, im, counters):  # type: ignore[no-untyped-def]
    """into[i] += theirs[i ^ flip] * factor * (-1)^popcount(i & sign), for all Pauli strings.

    fixed[g] is what the Pauli strings of group g whose signs are within a block make of any block. For the others,
    places[Pauli string] is the row of `tables` that has the signs within the block (row 0: all ones)."""
    size = fixed.shape[2]
    while True:
        base = fetch_add(counters, 0, 1) * size
        if 2 * base >= len(into):
            break
        for group in range(len(flips)):
            _factor(re, im, group, starts[group], starts[group + 1], base, fixed, signs, factors, tables, places)
            inside = flips[group] & (size - 1)
            other = base ^ (flips[group] - inside)
            for i in range(size):
                j, k = 2 * (other + (i ^ inside)), 2 * (base + i)
                a, b = theirs[j], theirs[j + 1]
                into[k] += re[i] * a - im[i] * b
                into[k + 1] += re[i] * b + im[i] * a
