"""The CPU kernel: tile by tile, amplitudes are copied into cache, all instructions run there, and they go back."""

from __future__ import annotations

import numpy as np

from unisono.quantum.kernels import code
from unisono.quantum.kernels.compiling import entry, inner
from unisono.quantum.kernels.rotations import turn1, turn2, turn3_0, turn3_1, turn3_2, turn3_3
from unisono.quantum.kernels.vector import (
    add,
    deinterleave,
    fetch,
    fetch_add,
    fma,
    fnma,
    gather_block,
    give_way,
    interleave,
    load,
    mul,
    parity,
    prefetch,
    scatter_block,
    splat,
    store,
    sub,
    total,
    width,
)

KIND, COUNT, FORM = code.KIND, code.COUNT, code.FORM
MASK0, MASK1, MASK2 = code.MASK0, code.MASK1, code.MASK2
ROWS, ROW_COUNT, VALUES = code.ROWS, code.ROW_COUNT, code.VALUES
FLIPS, FLIP_COUNT = code.FLIPS, code.FLIP_COUNT
CONDITIONS, CONDITION_COUNT = code.CONDITIONS, code.CONDITION_COUNT
TURNS, PAIR, PHASE, LANE_PHASE = code.TURNS, code.PAIR, code.PHASE, code.LANE_PHASE
FIRST, LAST, ROW_BITS, OUTSIDE_BITS = code.FIRST, code.LAST, code.ROW_BITS, code.OUTSIDE_BITS
PLACES, LANES, OUTSIDE, ORDER = code.PLACES, code.LANES, code.OUTSIDE, code.ORDER
SWEEP_FLIPS, SWEEP_FLIP_COUNT = code.SWEEP_FLIPS, code.SWEEP_FLIP_COUNT
ONE, LOW, LOW_BITS = code.ONE, code.LOW, code.LOW_BITS
AHEAD = 32  # rows


@inner()
def row_of(rows, begin, i):  # type: ignore[no-untyped-def]
    """Entry i of a linear table."""
    return np.int64(rows[begin + (i & (LOW - 1))]) ^ np.int64(rows[begin + LOW + (i >> LOW_BITS)])


@inner()
def flipped(pairs, begin, count, outside):  # type: ignore[no-untyped-def]
    """The shift of rows that the outside bits ask for."""
    shift = np.int64(0)
    for i in range(begin, begin + count):
        if parity(pairs[i, 0] & outside):
            shift ^= pairs[i, 1]
    return shift


@inner()
def holds(pairs, begin, count, outside):  # type: ignore[no-untyped-def]
    for i in range(begin, begin + count):  # noqa: SIM110 - kernels have no generators
        if parity(pairs[i, 0] & outside) != pairs[i, 1]:
            return False
    return True


@inner()
def turns(tile, op, rows, shift, values):  # type: ignore[no-untyped-def]
    """One to three bits turned in one pass. Three are divided by their cosines, or sines, the latter first."""
    begin, count, v, form = op[ROWS], op[ROW_COUNT], op[VALUES], op[FORM]
    m0, m1, m2 = op[MASK0], op[MASK1], op[MASK2]
    a, b = splat(values[v]), splat(values[v + 1])
    if op[COUNT] == 1:
        for i in range(count):
            turn1(tile, row_of(rows, begin, i) ^ shift, (m0,), (a, b))
        return
    c = splat(values[v + 2])
    if op[COUNT] == 2:
        d = splat(values[v + 3])
        for i in range(count):
            turn2(tile, row_of(rows, begin, i) ^ shift, (m0, m1), (a, b, c, d))
    elif form == 0:
        for i in range(count):
            turn3_0(tile, row_of(rows, begin, i) ^ shift, (m0, m1, m2), (a, b, c))
    elif form == 1:
        for i in range(count):
            turn3_1(tile, row_of(rows, begin, i) ^ shift, (m0, m1, m2), (a, b, c))
    elif form == 2:
        for i in range(count):
            turn3_2(tile, row_of(rows, begin, i) ^ shift, (m0, m1, m2), (a, b, c))
    else:
        for i in range(count):
            turn3_3(tile, row_of(rows, begin, i) ^ shift, (m0, m1, m2), (a, b, c))


@inner()
def pair(tile, op, rows, shift, values, transposed):  # type: ignore[no-untyped-def]
    """A real 2 x 2 matrix, whose entries may differ from lane to lane, on chosen rows."""
    w = width(tile)
    v = op[VALUES]
    k00, k01 = load(values, v), load(values, v + w)
    k10, k11 = load(values, v + 2 * w), load(values, v + 3 * w)
    if transposed:
        k01, k10 = k10, k01
    for i in range(op[ROW_COUNT]):
        row = row_of(rows, op[ROWS], i) ^ shift
        p0, p1 = 2 * w * row, 2 * w * (row ^ op[MASK0])
        for h in range(0, 2 * w, w):
            a0, a1 = load(tile, p0 + h), load(tile, p1 + h)
            store(tile, p0 + h, fma(k00, a0, mul(k01, a1)))
            store(tile, p1 + h, fma(k11, a1, mul(k10, a0)))


@inner()
def phase(tile, op, count, shift, values):  # type: ignore[no-untyped-def]
    """Each row times a number of its own."""
    w = width(tile)
    for row in range(count):
        p, v = 2 * w * row, op[VALUES] + 2 * (row ^ shift)
        re, im = load(tile, p), load(tile, p + w)
        c, s = splat(values[v]), splat(values[v + 1])
        store(tile, p, fnma(s, im, mul(c, re)))
        store(tile, p + w, fma(s, re, mul(c, im)))


@inner()
def lane_phase(tile, op, count, shift, values):  # type: ignore[no-untyped-def]
    """Each amplitude times a number of its own."""
    w = width(tile)
    for row in range(count):
        p, v = 2 * w * row, op[VALUES] + 2 * w * (row ^ shift)
        re, im = load(tile, p), load(tile, p + w)
        c, s = load(values, v), load(values, v + w)
        store(tile, p, fnma(s, im, mul(c, re)))
        store(tile, p + w, fma(s, re, mul(c, im)))


@inner()
def dense(tile, op, rows, shift, values, spare, adjoint):  # type: ignore[no-untyped-def]
    """A complex matrix on chosen rows, each lane with a weight of 1 or 0.

    The masks of the rows that its index chooses stand before the rows."""
    w = width(tile)
    size = 1 << op[COUNT]
    masks = op[ROWS] - size
    lanes = load(values, op[VALUES])
    entries = op[VALUES] + w
    for i in range(op[ROW_COUNT]):
        row = row_of(rows, op[ROWS], i) ^ shift
        for j in range(size):
            re = im = splat(values[entries] - values[entries])
            for k in range(size):
                p = 2 * w * (row ^ np.int64(rows[masks + k]))
                xr, xi = load(tile, p), load(tile, p + w)
                e = entries + 2 * (k * size + j if adjoint else j * size + k)
                c, s = splat(values[e]), splat(-values[e + 1] if adjoint else values[e + 1])
                re = fma(c, xr, fnma(s, xi, re))
                im = fma(c, xi, fma(s, xr, im))
            store(spare, 2 * w * j, re)
            store(spare, 2 * w * j + w, im)
        for j in range(size):
            p = 2 * w * (row ^ np.int64(rows[masks + j]))
            for h in range(0, 2 * w, w):
                old = load(tile, p + h)
                store(tile, p + h, fma(lanes, sub(load(spare, 2 * w * j + h), old), old))


@inner()
def _place(places, begin, i):  # type: ignore[no-untyped-def]
    return places[begin + (i & (LOW - 1))] + places[begin + LOW + (i >> LOW_BITS)]


@inner()
def gather(state, start, sweep, places, rows, order, tile, shift):  # type: ignore[no-untyped-def]
    """Copy a tile; place i of it becomes row row_of(rows, order, i) ^ shift."""
    w = width(tile)
    count = 1 << sweep[ROW_BITS]
    begin = sweep[PLACES]
    if sweep[LANES] < 0:
        for i in range(count):
            p = start + _place(places, begin, i)
            prefetch(state, start + _place(places, begin, (i + AHEAD) & (count - 1)))
            row = 2 * w * (row_of(rows, order, i) ^ shift)
            re, im = deinterleave(load(state, p), load(state, p + w))
            store(tile, row, re)
            store(tile, row + w, im)
    else:
        lanes = places[sweep[LANES] : sweep[LANES] + w]
        for i in range(0, count, w):
            flip = shift ^ np.int64(rows[order + LOW + (i >> LOW_BITS)])
            gather_block(state, start + _place(places, begin, i), lanes, tile, rows, order + (i & (LOW - 1)), flip)


@inner()
def scatter(state, start, sweep, places, rows, order, tile, shift, scale):  # type: ignore[no-untyped-def]
    """Copy a tile back: place i of it is row row_of(rows, order, i) ^ shift."""
    w = width(tile)
    count = 1 << sweep[ROW_BITS]
    begin = sweep[PLACES]
    factor = splat(scale)
    if sweep[LANES] < 0:
        for i in range(count):
            p = start + _place(places, begin, i)
            prefetch(state, start + _place(places, begin, (i + AHEAD) & (count - 1)))
            row = 2 * w * (row_of(rows, order, i) ^ shift)
            first, second = interleave(mul(load(tile, row), factor), mul(load(tile, row + w), factor))
            store(state, p, first)
            store(state, p + w, second)
    else:
        lanes = places[sweep[LANES] : sweep[LANES] + w]
        for i in range(0, count, w):
            flip = shift ^ np.int64(rows[order + LOW + (i >> LOW_BITS)])
            at, first_row = start + _place(places, begin, i), order + (i & (LOW - 1))
            scatter_block(state, at, lanes, tile, rows, first_row, flip, factor)


@inner()
def start_of(sweep, places, number):  # type: ignore[no-untyped-def]
    """Where in the state tile `number` begins."""
    start = np.int64(0)
    for bit in range(sweep[OUTSIDE_BITS]):
        if number >> bit & 1:
            start += places[sweep[OUTSIDE] + bit]
    return start


@inner()
def meet(counters, index, threads):  # type: ignore[no-untyped-def]
    """Wait until all threads are here."""
    fetch_add(counters, index, 1)
    spins = 0
    while fetch_add(counters, index, 0) < threads:
        spins += 1
        if spins > 2000:
            give_way()


@inner()
def _tile(tile, spare, first, last, outside, count, ops, rows, pairs, values):  # type: ignore[no-untyped-def]
    for number in range(first, last):
        op = ops[number]
        if not holds(pairs, op[CONDITIONS], op[CONDITION_COUNT], outside):
            continue
        shift = flipped(pairs, op[FLIPS], op[FLIP_COUNT], outside)
        kind = op[KIND]
        if kind == TURNS:
            turns(tile, op, rows, shift, values)
        elif kind == PHASE:
            phase(tile, op, count, shift, values)
        elif kind == PAIR:
            pair(tile, op, rows, shift, values, np.bool_(False))
        elif kind == LANE_PHASE:
            lane_phase(tile, op, count, shift, values)
        else:
            dense(tile, op, rows, shift, values, spare, np.bool_(False))


@entry()
def forward(state, sweeps, ops, rows, pairs, places, values, scales, tile, spare, counters, threads):  # type: ignore[no-untyped-def]
    """Run all sweeps, together with threads - 1 other calls that share everything but `tile` and `spare`.

    `rows` begins with the rows in which a tile begins."""
    none = np.int64(0)  # a literal 0 would be a type of its own, and gather compiled twice
    for number in range(len(sweeps)):
        sweep = sweeps[number]
        tiles = 1 << sweep[OUTSIDE_BITS]
        while True:
            mine = fetch_add(counters, 2 * number, 1)
            if mine >= tiles:
                break
            start = start_of(sweep, places, mine)
            outside = mine | ONE
            gather(state, start, sweep, places, rows, none, tile, none)
            _tile(tile, spare, sweep[FIRST], sweep[LAST], outside, 1 << sweep[ROW_BITS], ops, rows, pairs, values)
            shift = flipped(pairs, sweep[SWEEP_FLIPS], sweep[SWEEP_FLIP_COUNT], outside)
            scatter(state, start, sweep, places, rows, sweep[ORDER], tile, shift, scales[number])
        meet(counters, 2 * number + 1, threads)


# ---- counters in memory that processes share: the progress of the ranks of a host ------------------------------------


_SPINS = 200  # before other threads may run


@entry()
def advance(counters, index):  # type: ignore[no-untyped-def]
    """Add one; whoever sees it sees what was written before."""
    fetch_add(counters, index, 1)


@entry()
def reached(counters, index, goal, reads):  # type: ignore[no-untyped-def]
    """Whether the counter reaches `goal` within so many reads."""
    for read in range(reads):
        if fetch(counters, index) >= goal:
            return True
        if read > _SPINS:
            give_way()
    return False


# ---- the norm of a state, which is checked after every exchange ------------------------------------------------------


_CHUNK = 1 << 14  # numbers that are added up in their own precision


@entry()
def squares(numbers):  # type: ignore[no-untyped-def]
    """Of a flat array whose length is a multiple of _CHUNK."""
    w = width(numbers)
    found = 0.0
    for begin in range(0, len(numbers), _CHUNK):
        first = load(numbers, begin)
        a = b = c = d = sub(first, first)
        for i in range(begin, begin + _CHUNK, 4 * w):
            p, q, r, s = load(numbers, i), load(numbers, i + w), load(numbers, i + 2 * w), load(numbers, i + 3 * w)
            a, b, c, d = fma(p, p, a), fma(q, q, b), fma(r, r, c), fma(s, s, d)
        found += total(add(add(a, b), add(c, d)))
    return found
