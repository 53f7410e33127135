"""Turns of one to three bits on the rows of a tile, as single operations of kernels.

Written out for LLVM here, and not as numba functions of loads and stores, because those take numba seconds to compile.
A row's vectors are read at both halves (real and imaginary parts); row k of a block differs from the first by the
masks of the bits of k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba.core import types

from unisono.quantum.kernels.vector import address, alignment, fused, intrinsic, kind_of, plus

Turned = Callable[[Any, Any, Any], tuple[Any, Any]]


def _turning(bits: int, cotangents: int | None) -> Any:
    """Turns, in this order. With cotangents=None, numbers are cosines and sines in turn; else they are `cotangents`
    cotangents, then tangents, and the sines and cosines are divided out."""

    def describe(typing: Any, tile: Any, row: Any, masks: Any, numbers: Any) -> Any:
        vector = kind_of(tile)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            starts = _starts(builder, args[1], _unpacked(builder, args[2], bits), vector.width)
            given = _unpacked(builder, args[3], numbers.count)
            turned = [_turned(builder, given, bit, cotangents) for bit in range(bits)]
            for half in (0, vector.width):
                places = [address(context, builder, tile, args[0], plus(builder, start, half)) for start in starts]
                values = [builder.load(place, align=alignment(tile)) for place in places]
                for bit in range(bits):
                    for low, high in _pairs(bits, bit):
                        values[low], values[high] = turned[bit](values[low], values[high])
                for value, place in zip(values, places, strict=True):
                    builder.store(value, place, align=alignment(tile))
            return context.get_dummy_value()

        return types.void(tile, types.intp, masks, numbers), generate

    return intrinsic(describe)


def _turned(builder: Any, numbers: Sequence[Any], bit: int, cotangents: int | None) -> Callable[[Any, Any], Any]:
    def by_angle(a: Any, b: Any) -> tuple[Any, Any]:
        c, s = numbers[2 * bit], numbers[2 * bit + 1]
        return (
            fused(builder, builder.fneg(s), b, builder.fmul(c, a)),
            fused(builder, s, a, builder.fmul(c, b)),
        )

    def by_tangent(a: Any, b: Any) -> tuple[Any, Any]:
        t = numbers[bit]
        return fused(builder, builder.fneg(t), b, a), fused(builder, t, a, b)

    def by_cotangent(a: Any, b: Any) -> tuple[Any, Any]:
        t = numbers[bit]
        return builder.fsub(builder.fmul(t, a), b), fused(builder, t, b, a)

    if cotangents is None:
        return by_angle
    return by_cotangent if bit < cotangents else by_tangent


turn1, turn2 = _turning(1, None), _turning(2, None)
turn3_0, turn3_1, turn3_2, turn3_3 = (_turning(3, cotangents) for cotangents in range(4))


def _turning_back(bits: int) -> Any:
    """Turns undone on a state and its co-state; `sums` grow by what each bit's gradient gets from the rows.

    Two bits are done in registers, then the third: eight rows of both states do not fit."""

    def describe(typing: Any, psi: Any, lam: Any, row: Any, masks: Any, numbers: Any, sums: Any) -> Any:
        vector = kind_of(psi)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            starts = _starts(builder, args[2], _unpacked(builder, args[3], bits), vector.width)
            given = _unpacked(builder, args[4], 2 * bits)
            found = _unpacked(builder, args[5], bits)
            for half in (0, vector.width):
                places = [
                    [address(context, builder, psi, array, plus(builder, start, half)) for start in starts]
                    for array in args[:2]
                ]
                for chosen, rows in _rounds(bits):
                    both = [[states[row] for row in rows] for states in places]
                    _round(builder, both, chosen, given, found, alignment(psi))
            return context.make_tuple(builder, signature.return_type, found)

        return sums(psi, lam, types.intp, masks, numbers, sums), generate

    return intrinsic(describe)


def _rounds(bits: int) -> list[tuple[list[int], list[int]]]:
    """Which bits are undone together, on which rows of the block."""
    if bits < 3:
        return [([*range(bits)], [*range(1 << bits)])]
    return [([0, 1], [0, 1, 2, 3]), ([0, 1], [4, 5, 6, 7]), *(([2], [low, low + 4]) for low in range(4))]


def _round(
    builder: Any, places: list[list[Any]], chosen: list[int], numbers: list[Any], sums: list[Any], align: int
) -> None:
    psi, lam = ([builder.load(place, align=align) for place in each] for each in places)
    for number, bit in enumerate(chosen):
        for low, high in _pairs(len(chosen), number):
            part = fused(builder, builder.fneg(lam[low]), psi[high], sums[bit])
            sums[bit] = fused(builder, lam[high], psi[low], part)
    for values in (psi, lam):
        for number, bit in enumerate(chosen):
            c, s = numbers[2 * bit], numbers[2 * bit + 1]
            for low, high in _pairs(len(chosen), number):
                a, b = values[low], values[high]
                values[low] = fused(builder, c, a, builder.fmul(s, b))
                values[high] = fused(builder, builder.fneg(s), a, builder.fmul(c, b))
    for values, each in zip((psi, lam), places, strict=True):
        for value, place in zip(values, each, strict=True):
            builder.store(value, place, align=align)


back1, back2, back3 = _turning_back(1), _turning_back(2), _turning_back(3)


def _pairs(bits: int, bit: int) -> list[tuple[int, int]]:
    return [(low, low | 1 << bit) for low in range(1 << bits) if not low >> bit & 1]


def _starts(builder: Any, row: Any, masks: Sequence[Any], width: int) -> list[Any]:
    """Where in the tile each row of the block begins."""
    rows = [row]
    for mask in masks:
        rows += [builder.xor(each, mask) for each in rows]
    return [builder.mul(each, each.type(2 * width)) for each in rows]


def _unpacked(builder: Any, values: Any, count: int) -> list[Any]:
    return [builder.extract_value(values, number) for number in range(count)]
