"""The gradient's kernel: the program backwards, on a state and its co-state at once while their tile is in cache.

With E = <psi|O|psi> and the co-state lambda = O psi carried back beside psi, a turn by angle a has
dE/da = sum of lambda1 psi0 - lambda0 psi1 over its pairs of rows, and a phase exp(i f) has dE/df = -2 Im(conj(lambda)
psi) for each amplitude: sums over rows from which the angles of all merged phases follow (bind.py).
"""

from __future__ import annotations

import numpy as np

from unisono.quantum.kernels import code
from unisono.quantum.kernels.compiling import entry, inner
from unisono.quantum.kernels.cpu import dense, flipped, gather, holds, meet, pair, row_of, scatter, start_of
from unisono.quantum.kernels.rotations import back1, back2, back3
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


@inner()
def _turns(psi, lam, op, rows, shift, halves, gradients):  # type: ignore[no-untyped-def]
    slot, begin, count = op[SLOT], op[ROWS], op[ROW_COUNT]
    m0, m1, m2 = op[MASK0], op[MASK1], op[MASK2]
    c0, s0 = splat(halves[2 * slot]), splat(halves[2 * slot + 1])
    g0 = g1 = g2 = sub(c0, c0)
    if op[COUNT] == 1:
        for i in range(count):
            (g0,) = back1(psi, lam, row_of(rows, begin, i) ^ shift, (m0,), (c0, s0), (g0,))
    else:
        c1, s1 = splat(halves[2 * slot + 2]), splat(halves[2 * slot + 3])
        if op[COUNT] == 2:
            for i in range(count):
                g0, g1 = back2(psi, lam, row_of(rows, begin, i) ^ shift, (m0, m1), (c0, s0, c1, s1), (g0, g1))
        else:
            numbers = (c0, s0, c1, s1, splat(halves[2 * slot + 4]), splat(halves[2 * slot + 5]))
            for i in range(count):
                g0, g1, g2 = back3(psi, lam, row_of(rows, begin, i) ^ shift, (m0, m1, m2), numbers, (g0, g1, g2))
            gradients[slot + 2] += total(g2)
        gradients[slot + 1] += total(g1)
    gradients[slot] += total(g0)


@inner()
def _pair_gradient(psi, lam, op, rows, shift, values, gradients):  # type: ignore[no-untyped-def]
    w = width(psi)
    weights = load(values, op[VALUES] + 4 * w)
    g = sub(weights, weights)
    for i in range(op[ROW_COUNT]):
        row = row_of(rows, op[ROWS], i) ^ shift
        p0, p1 = 2 * w * row, 2 * w * (row ^ op[MASK0])
        for h in range(0, 2 * w, w):
            g = fma(load(lam, p1 + h), load(psi, p0 + h), fnma(load(lam, p0 + h), load(psi, p1 + h), g))
    gradients[op[SLOT]] += total(mul(g, weights))


@inner()
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


@inner()
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


@inner()
def _tile(psi, lam, spare, first, last, outside, count, ops, rows, pairs, values, halves, gradients, sums):  # type: ignore[no-untyped-def]
    for number in range(last - 1, first - 1, -1):
        op = ops[number]
        if not holds(pairs, op[CONDITIONS], op[CONDITION_COUNT], outside):
            continue
        shift = flipped(pairs, op[FLIPS], op[FLIP_COUNT], outside)
        kind = op[KIND]
        if kind == TURNS:
            _turns(psi, lam, op, rows, shift, halves, gradients)
        elif kind == PHASE:
            _phase(psi, lam, op, count, shift, values, sums, op[SLOT] >= 0)
        elif kind == PAIR:
            if op[SLOT] >= 0:
                _pair_gradient(psi, lam, op, rows, shift, values, gradients)
            pair(psi, op, rows, shift, values, np.bool_(True))
            pair(lam, op, rows, shift, values, np.bool_(True))
        elif kind == LANE_PHASE:
            _lane_phase(psi, lam, op, count, shift, values, sums)
        else:
            dense(psi, op, rows, shift, values, spare, np.bool_(True))
            dense(lam, op, rows, shift, values, spare, np.bool_(True))


@entry()
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
    one, none = halves[len(halves) - 1], np.int64(0)
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
            scatter(state, start, sweep, places, rows, none, psi, none, one)
            scatter(costate, start, sweep, places, rows, none, lam, none, one)
        meet(counters, 2 * number + 1, threads)
