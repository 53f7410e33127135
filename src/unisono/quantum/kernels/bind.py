"""Numbers for a program's angles: tangents of turns, tables of phases; and gradients of angles from sums over rows."""

from __future__ import annotations

import math

from unisono.quantum.kernels import code
from unisono.quantum.kernels.compiling import entry, inner
from unisono.quantum.kernels.vector import parity

KIND, COUNT, FORM, MASK0 = code.KIND, code.COUNT, code.FORM, code.MASK0
ROWS, ROW_COUNT, VALUES, SLOT = code.ROWS, code.ROW_COUNT, code.VALUES, code.SLOT
TURNS, PAIR, PHASE, LANE_PHASE = code.TURNS, code.PAIR, code.PHASE, code.LANE_PHASE
FIRST, LAST = code.FIRST, code.LAST


@inner()
def _turns(op, angles, values):  # type: ignore[no-untyped-def]
    """Of three turns: tangents and cotangents, the cotangents first with their masks; of fewer: cosines and sines.

    Returns the factor that was divided out."""
    count = op[COUNT]
    slot, v = op[SLOT], op[VALUES]
    scale = 1.0
    place = 0
    masks = (op[MASK0], op[MASK0 + 1], op[MASK0 + 2])
    op[FORM] = 0
    if count < 3:
        for k in range(count):
            values[v + 2 * k] = math.cos(angles[slot + k] / 2)
            values[v + 2 * k + 1] = math.sin(angles[slot + k] / 2)
        return 1.0
    for form in range(2):
        for k in range(count):
            c, s = math.cos(angles[slot + k] / 2), math.sin(angles[slot + k] / 2)
            cotangent = abs(s) > abs(c)
            if cotangent == (form == 0):
                values[v + place] = c / s if cotangent else s / c
                scale *= s if cotangent else c
                op[MASK0 + place] = masks[k]
                op[FORM] += cotangent
                place += 1
    return scale


@inner()
def _pair(op, angles, values, width):  # type: ignore[no-untyped-def]
    v, slot = op[VALUES], op[SLOT]
    c, s = math.cos(angles[slot] / 2), math.sin(angles[slot] / 2)
    for lane in range(width):
        weight = values[v + 4 * width + lane]
        values[v + lane] = values[v + 3 * width + lane] = c if weight else 1.0
        values[v + width + lane] = -s * weight
        values[v + 2 * width + lane] = s * weight


@inner()
def _index(terms, at, row, lane):  # type: ignore[no-untyped-def]
    """The entry of its table that a phase's record reads for a row and lane; -1 where a guard fails."""
    guards, bits = terms[at + 4], terms[at + 5]
    at += 6
    for _ in range(guards):
        if parity(terms[at] & row) ^ parity(terms[at + 1] & lane) ^ terms[at + 2]:
            return -1
        at += 3
    index = 0
    for _ in range(bits):
        index = index << 1 | (parity(terms[at] & row) ^ parity(terms[at + 1] & lane) ^ terms[at + 2])
        at += 3
    return index


@inner()
def _phase(op, terms, tables, values, width, spare):  # type: ignore[no-untyped-def]
    rows = op[ROW_COUNT]
    lanes = width if op[KIND] == LANE_PHASE else 1
    spare[: rows * lanes] = 0.0
    at = op[ROWS]
    for _ in range(op[COUNT]):
        table = terms[at + 1]
        if terms[at + 4] == 0 and terms[at + 5] == 1 and lanes == 1:
            mask, flip = terms[at + 6], terms[at + 8]
            first, second = tables[table + flip], tables[table + 1 - flip]
            for row in range(rows):
                spare[row] += second if parity(mask & row) else first
        else:
            for row in range(rows):
                for lane in range(lanes):
                    index = _index(terms, at, row, lane)
                    if index >= 0:
                        spare[row * lanes + lane] += tables[table + index]
        at += terms[at]
    v = op[VALUES]
    for row in range(rows):
        for lane in range(lanes):
            values[v + 2 * lanes * row + lane] = math.cos(spare[row * lanes + lane])
            values[v + 2 * lanes * row + lanes + lane] = math.sin(spare[row * lanes + lane])


@inner()
def _add(at, indices, factors, given, angles):  # type: ignore[no-untyped-def]
    for k in range(len(at)):
        angles[at[k]] += factors[k] * given[indices[k]]


@entry()
def evaluate(constants, at, indices, factors, weights, at_, indices_, factors_, features, angles):  # type: ignore[no-untyped-def]
    """angles[i] = constants[i] and all factors[k] * weights[indices[k]] with at[k] = i; those of features likewise."""
    for i in range(len(constants)):
        angles[i] = constants[i]
    _add(at, indices, factors, weights, angles)
    _add(at_, indices_, factors_, features, angles)


@entry()
def bind(sweeps, ops, terms, tables, angles, values, scales, width, spare):  # type: ignore[no-untyped-def]
    """Fill in `values`, the turns' forms and the order of their masks in `ops`, and the factor of each sweep."""
    for number in range(len(sweeps)):
        scale = 1.0
        for i in range(sweeps[number, FIRST], sweeps[number, LAST]):
            op = ops[i]
            if op[KIND] == TURNS:
                scale *= _turns(op, angles, values)
            elif op[KIND] == PAIR:
                if op[SLOT] >= 0:
                    _pair(op, angles, values, width)
            elif op[KIND] == PHASE or op[KIND] == LANE_PHASE:
                _phase(op, terms, tables, values, width, spare)
        scales[number] = scale


@entry()
def phase_gradients(ops, terms, slopes, sums, width, gradients):  # type: ignore[no-untyped-def]
    """gradients[angle] += -2 sum of slope * sums over rows, for every phase term that has an angle."""
    for i in range(len(ops)):
        op = ops[i]
        if (op[KIND] != PHASE and op[KIND] != LANE_PHASE) or op[SLOT] < 0:
            continue
        rows = op[ROW_COUNT]
        lanes = width if op[KIND] == LANE_PHASE else 1
        at = op[ROWS]
        for _ in range(op[COUNT]):
            if terms[at + 3]:
                total = 0.0
                for row in range(rows):
                    for lane in range(lanes):
                        index = _index(terms, at, row, lane)
                        if index >= 0:
                            total += slopes[terms[at + 1] + index] * sums[op[SLOT] + row * lanes + lane]
                gradients[terms[at + 2]] -= 2.0 * total
            at += terms[at]
