"""The gradient's kernel: the program backwards, on a state and its co-state at once while their tile is in cache.

With E = <psi|O|psi> and the co-state lambda = O psi carried back beside psi, a turn by angle a has
dE/da = sum of lambda1 psi0 - lambda0 psi1 over its pairs of rows, and a phase exp(i f) has dE/df = -2 Im(conj(lambda)
psi) for each amplitude: sums over rows from which the angles of all merged phases follow (bind.py).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from unisono.quantum.kernels import code
from unisono.quantum.kernels.cpu import dense, flipped, gather, holds, inline, meet, pair, scatter, start_of
from unisono.quantum.kernels.vector import fetch_add, fma, fnma, load, mul, splat, store, sub, total, width

KIND, COUNT, SLOT, VALUES = code.KIND, code.COUNT, code.SLOT, code.VALUES
MASK0, MASK1, MASK2 = code.MASK0, code.MASK1, code.MASK2
ROWS, ROW_COUNT = code.ROWS, code.ROW_COUNT
FLIPS, FLIP_COUNT = code.FLIPS, code.FLIP_COUNT
CONDITIONS, CONDITION_COUNT = code.CONDITIONS, code.CONDITION_COUNT
TURNS, PAIR, PHASE, LANE_PHASE = code.TURNS, code.PAIR, code.PHASE, code.LANE_PHASE
FIRST, LAST, ROW_BITS, OUTSIDE_BITS = code.FIRST, code.LAST, code.ROW_BITS, code.OUTSIDE_BITS
ORDER, SWEEP_FLIPS, SWEEP_FLIP_COUNT = code.ORDER, code.SWEEP_FLIPS, code.SWEEP_FLIP_COUNT
ONE = code.ONE


@inline
def _back(a, b, c, s):  # type: ignore[no-untyped-def]
    """A turn undone."""
    return fma(c, a, mul(s, b)), fnma(s, a, mul(c, b))


@inline
def _one(psi, lam, p0, p1, c, s, g):  # type: ignore[no-untyped-def]
    x0, x1, y0, y1 = load(psi, p0), load(psi, p1), load(lam, p0), load(lam, p1)
    g = fma(y1, x0, fnma(y0, x1, g))
    x0, x1 = _back(x0, x1, c, s)
    y0, y1 = _back(y0, y1, c, s)
    store(psi, p0, x0)
    store(psi, p1, x1)
    store(lam, p0, y0)
    store(lam, p1, y1)
    return g


@inline
def _two(psi, lam, p0, p1, p2, p3, c0, s0, c1, s1, g0, g1):  # type: ignore[no-untyped-def]
    x0, x1, x2, x3 = load(psi, p0), load(psi, p1), load(psi, p2), load(psi, p3)
    y0, y1, y2, y3 = load(lam, p0), load(lam, p1), load(lam, p2), load(lam, p3)
    g0 = fma(y1, x0, fnma(y0, x1, g0))
    g1 = fma(y2, x0, fnma(y0, x2, g1))
    g0 = fma(y3, x2, fnma(y2, x3, g0))
    g1 = fma(y3, x1, fnma(y1, x3, g1))
    x0, x1 = _back(x0, x1, c0, s0)
    x2, x3 = _back(x2, x3, c0, s0)
    x0, x2 = _back(x0, x2, c1, s1)
    x1, x3 = _back(x1, x3, c1, s1)
    store(psi, p0, x0)
    store(psi, p1, x1)
    store(psi, p2, x2)
    store(psi, p3, x3)
    y0, y1 = _back(y0, y1, c0, s0)
    y2, y3 = _back(y2, y3, c0, s0)
    y0, y2 = _back(y0, y2, c1, s1)
    y1, y3 = _back(y1, y3, c1, s1)
    store(lam, p0, y0)
    store(lam, p1, y1)
    store(lam, p2, y2)
    store(lam, p3, y3)
    return g0, g1


@inline
def _turns1(psi, lam, op, rows, shift, halves, gradients):  # type: ignore[no-untyped-def]
    w, slot = width(psi), op[SLOT]
    c, s = splat(halves[2 * slot]), splat(halves[2 * slot + 1])
    g = sub(c, c)
    for i in range(op[ROWS], op[ROWS] + op[ROW_COUNT]):
        row = np.int64(rows[i]) ^ shift
        p0, p1 = 2 * w * row, 2 * w * (row ^ op[MASK0])
        for h in range(0, 2 * w, w):
            g = _one(psi, lam, p0 + h, p1 + h, c, s, g)
    gradients[slot] += total(g)


@inline
def _turns2(psi, lam, op, rows, shift, halves, gradients):  # type: ignore[no-untyped-def]
    w, slot = width(psi), op[SLOT]
    m0, m1 = op[MASK0], op[MASK1]
    c0, s0 = splat(halves[2 * slot]), splat(halves[2 * slot + 1])
    c1, s1 = splat(halves[2 * slot + 2]), splat(halves[2 * slot + 3])
    g0, g1 = sub(c0, c0), sub(c0, c0)
    for i in range(op[ROWS], op[ROWS] + op[ROW_COUNT]):
        row = np.int64(rows[i]) ^ shift
        p0, p1 = 2 * w * row, 2 * w * (row ^ m0)
        p2, p3 = 2 * w * (row ^ m1), 2 * w * (row ^ m0 ^ m1)
        for h in range(0, 2 * w, w):
            g0, g1 = _two(psi, lam, p0 + h, p1 + h, p2 + h, p3 + h, c0, s0, c1, s1, g0, g1)
    gradients[slot] += total(g0)
    gradients[slot + 1] += total(g1)


@inline
def _turns3(psi, lam, op, rows, shift, halves, gradients):  # type: ignore[no-untyped-def]
    """Two bits in registers, then the third: eight rows of both states do not fit."""
    w, slot = width(psi), op[SLOT]
    m0, m1, m2 = op[MASK0], op[MASK1], op[MASK2]
    c0, s0 = splat(halves[2 * slot]), splat(halves[2 * slot + 1])
    c1, s1 = splat(halves[2 * slot + 2]), splat(halves[2 * slot + 3])
    c2, s2 = splat(halves[2 * slot + 4]), splat(halves[2 * slot + 5])
    g0, g1, g2 = sub(c0, c0), sub(c0, c0), sub(c0, c0)
    for i in range(op[ROWS], op[ROWS] + op[ROW_COUNT]):
        row = np.int64(rows[i]) ^ shift
        p0, p1 = 2 * w * row, 2 * w * (row ^ m0)
        p2, p3 = 2 * w * (row ^ m1), 2 * w * (row ^ m0 ^ m1)
        p4, p5 = 2 * w * (row ^ m2), 2 * w * (row ^ m0 ^ m2)
        p6, p7 = 2 * w * (row ^ m1 ^ m2), 2 * w * (row ^ m0 ^ m1 ^ m2)
        for h in range(0, 2 * w, w):
            g0, g1 = _two(psi, lam, p0 + h, p1 + h, p2 + h, p3 + h, c0, s0, c1, s1, g0, g1)
            g0, g1 = _two(psi, lam, p4 + h, p5 + h, p6 + h, p7 + h, c0, s0, c1, s1, g0, g1)
            g2 = _one(psi, lam, p0 + h, p4 + h, c2, s2, g2)
            g2 = _one(psi, lam, p1 + h, p5 + h, c2, s2, g2)
            g2 = _one(psi, lam, p2 + h, p6 + h, c2, s2, g2)
            g2 = _one(psi, lam, p3 + h, p7 + h, c2, s2, g2)
    gradients[slot] += total(g0)
    gradients[slot + 1] += total(g1)
    gradients[slot + 2] += total(g2)


@inline
def _pair_gradient(psi, lam, op, rows, shift, values, gradients):  # type: ignore[no-untyped-def]
    w = width(psi)
    weights = load(values, op[VALUES] + 4 * w)
    g = sub(weights, weights)
    for i in range(op[ROWS], op[ROWS] + op[ROW_COUNT]):
        row = np.int64(rows[i]) ^ shift
        p0, p1 = 2 * w * row, 2 * w * (row ^ op[MASK0])
        for h in range(0, 2 * w, w):
            g = fma(load(lam, p1 + h), load(psi, p0 + h), fnma(load(lam, p0 + h), load(psi, p1 + h), g))
    gradients[op[SLOT]] += total(mul(g, weights))


@inline
def _phase(psi, lam, op, count, shift, values, sums, differentiable):  # type: ignore[no-untyped-def]
    w = width(psi)
    slot = op[SLOT]
    for row in range(count):
        p, v = 2 * w * row, op[VALUES] + 2 * (row ^ shift)
        xr, xi, yr, yi = load(psi, p), load(psi, p + w), load(lam, p), load(lam, p + w)
        if differentiable:
            sums[slot + (row ^ shift)] += total(fnma(yi, xr, mul(yr, xi)))
        c, s = splat(values[v]), splat(values[v + 1])
        store(psi, p, fma(s, xi, mul(c, xr)))
        store(psi, p + w, fnma(s, xr, mul(c, xi)))
        store(lam, p, fma(s, yi, mul(c, yr)))
        store(lam, p + w, fnma(s, yr, mul(c, yi)))


@inline
def _lane_phase(psi, lam, op, count, shift, values, sums):  # type: ignore[no-untyped-def]
    w = width(psi)
    for row in range(count):
        p, v = 2 * w * row, op[VALUES] + 2 * w * (row ^ shift)
        if op[SLOT] >= 0:
            for lane in range(w):
                product = lam[p + lane] * psi[p + w + lane] - lam[p + w + lane] * psi[p + lane]
                sums[op[SLOT] + w * (row ^ shift) + lane] += product
        c, s = load(values, v), load(values, v + w)
        for tile in (psi, lam):
            re, im = load(tile, p), load(tile, p + w)
            store(tile, p, fma(s, im, mul(c, re)))
            store(tile, p + w, fnma(s, re, mul(c, im)))


@inline
def _tile(psi, lam, spare, first, last, outside, count, ops, rows, pairs, values, halves, gradients, sums):  # type: ignore[no-untyped-def]
    for number in range(last - 1, first - 1, -1):
        op = ops[number]
        if not holds(pairs, op[CONDITIONS], op[CONDITION_COUNT], outside):
            continue
        shift = flipped(pairs, op[FLIPS], op[FLIP_COUNT], outside)
        kind = op[KIND]
        if kind == TURNS:
            if op[COUNT] == 3:
                _turns3(psi, lam, op, rows, shift, halves, gradients)
            elif op[COUNT] == 2:
                _turns2(psi, lam, op, rows, shift, halves, gradients)
            else:
                _turns1(psi, lam, op, rows, shift, halves, gradients)
        elif kind == PHASE:
            _phase(psi, lam, op, count, shift, values, sums, op[SLOT] >= 0)
        elif kind == PAIR:
            if op[SLOT] >= 0:
                _pair_gradient(psi, lam, op, rows, shift, values, gradients)
            pair(psi, op, rows, shift, values, True)
            pair(lam, op, rows, shift, values, True)
        elif kind == LANE_PHASE:
            _lane_phase(psi, lam, op, count, shift, values, sums)
        else:
            dense(psi, op, rows, shift, values, spare, True)
            dense(lam, op, rows, shift, values, spare, True)


@njit(nogil=True, cache=True, error_model="numpy")
def reverse(  # type: ignore[no-untyped-def]
    state,
    costate,
    sweeps,
    ops,
    rows,
    pairs,
    places,
    values,
    halves,
    psi,
    lam,
    spare,
    gradients,
    sums,
    counters,
    threads,
):
    """Undo all sweeps on both states; this thread's share of the turns' gradients and of the phases' sums is added.

    `halves` has the cosine and sine of half of each turn's angle, and a 1 at the end; `ops` has the turns' masks in the
    order of `halves`."""
    one = halves[len(halves) - 1]
    for number in range(len(sweeps) - 1, -1, -1):
        sweep = sweeps[number]
        tiles = 1 << sweep[OUTSIDE_BITS]
        count = 1 << sweep[ROW_BITS]
        while True:
            mine = fetch_add(counters, 2 * number, 1)
            if mine >= tiles:
                break
            start = start_of(sweep, places, mine)
            outside = mine | ONE
            shift = flipped(pairs, sweep[SWEEP_FLIPS], sweep[SWEEP_FLIP_COUNT], outside)
            gather(state, start, sweep, places, rows, sweep[ORDER], psi, shift)
            gather(costate, start, sweep, places, rows, sweep[ORDER], lam, shift)
            _tile(
                psi, lam, spare, sweep[FIRST], sweep[LAST], outside, count,
                ops, rows, pairs, values, halves, gradients, sums,
            )  # fmt: skip
            scatter(state, start, sweep, places, rows, 0, psi, 0, one)
            scatter(costate, start, sweep, places, rows, 0, lam, 0, one)
        meet(counters, 2 * number + 1, threads)
