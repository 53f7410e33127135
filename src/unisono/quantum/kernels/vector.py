"""Vectors of one row's width as values inside numba functions, because loops over rows do not vectorise by themselves.

A vector is 32 bytes: 8 float32 or 4 float64. `load(array, i)` reads the vector that begins at element i of a flat
array; its element type follows the array's. Everything compiles to plain LLVM vector instructions, split or widened by
LLVM to what the processor has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.core.datamodel import models

BYTES = 32

intrinsic: Any = extending.intrinsic


class Vector(types.Type):
    def __init__(self, element: types.Float) -> None:
        self.element = element
        self.width = BYTES * 8 // element.bitwidth
        super().__init__(name=f"Vector({element} x {self.width})")


@extending.register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, _backend(kind))


_KINDS = {types.float32: Vector(types.float32), types.float64: Vector(types.float64)}


def _backend(kind: Vector) -> ir.VectorType:
    return ir.VectorType(ir.FloatType() if kind.element == types.float32 else ir.DoubleType(), kind.width)


def address(context: Any, builder: Any, kind: types.Array, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    element = builder.gep(data, [index])
    return builder.bitcast(element, ir.PointerType(_backend(_KINDS[kind.dtype])))


def kind_of(array: types.Array) -> Vector:
    """The vectors of an array."""
    return _KINDS[array.dtype]


def alignment(kind: types.Array) -> int:
    return _KINDS[kind.dtype].element.bitwidth // 8


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    vector = _KINDS[array.dtype]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(address(context, builder, array, args[0], args[1]), align=alignment(array))

    return vector(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, index: Any, vector: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], address(context, builder, array, args[0], args[1]), align=alignment(array))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    vector = _KINDS[scalar]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        backend = _backend(vector)
        nothing = ir.Constant(backend, ir.Undefined)
        first = builder.insert_element(nothing, args[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, nothing, _picks([0] * vector.width))

    return vector(scalar), generate


def _picks(indices: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), list(indices))


def _elementwise(emit: Callable[[Any, Sequence[Any], ir.VectorType], Any], count: int) -> Any:
    def describe(vector: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args, _backend(vector))

        return vector(*[vector] * count), generate

    return describe


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    return _elementwise(lambda builder, args, _: builder.fadd(*args), 2)(a)


@intrinsic
def sub(typing: Any, a: Any, b: Any) -> Any:
    return _elementwise(lambda builder, args, _: builder.fsub(*args), 2)(a)


@intrinsic
def mul(typing: Any, a: Any, b: Any) -> Any:
    return _elementwise(lambda builder, args, _: builder.fmul(*args), 2)(a)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of LLVM values."""
    return _fma(builder, [a, b, c], a.type)


def _fma(builder: Any, args: Sequence[Any], backend: ir.VectorType) -> Any:
    bits = 32 if isinstance(backend.element, ir.FloatType) else 64
    kind = ir.FunctionType(backend, [backend] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{backend.count}f{bits}"), args)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c"""
    return _elementwise(_fma, 3)(a)


@intrinsic
def fnma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """c - a * b"""

    def emit(builder: Any, args: Sequence[Any], backend: ir.VectorType) -> Any:
        return _fma(builder, [builder.fneg(args[0]), args[1], args[2]], backend)

    return _elementwise(emit, 3)(a)


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """The sum of the elements, in pairs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,) = args
        width = vector.width
        while width > 1:
            width //= 2
            nothing = ir.Constant(value.type, ir.Undefined)
            low = builder.shuffle_vector(value, nothing, _picks(range(width)))
            high = builder.shuffle_vector(value, nothing, _picks(range(width, 2 * width)))
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return vector.element(vector), generate


@intrinsic
def deinterleave(typing: Any, first: Any, second: Any) -> Any:
    """(even elements, odd elements) of two vectors that are adjacent: real and imaginary parts."""
    return _shuffled_pair(first, _apart)


@intrinsic
def interleave(typing: Any, even: Any, odd: Any) -> Any:
    return _shuffled_pair(even, _together)


def _shuffled_pair(vector: Any, picks: Callable[[int], tuple[Sequence[int], Sequence[int]]]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = [builder.shuffle_vector(args[0], args[1], _picks(each)) for each in picks(vector.width)]
        return context.make_tuple(builder, signature.return_type, pair)

    return types.UniTuple(vector, 2)(vector, vector), generate


@intrinsic
def width(typing: Any, array: Any) -> Any:
    """How many elements a vector of the array has: a constant."""
    count = _KINDS[array.dtype].width

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.intp, count)

    return types.intp(array), generate


@intrinsic
def gather_block(typing: Any, state: Any, index: Any, offsets: Any, tile: Any, rows: Any, first: Any, flip: Any) -> Any:
    """Rows `rows[first + i] ^ flip` of a tile from a square of amplitudes, transposed and with the parts apart.

    `width` amplitudes are adjacent at each of `width` places, `offsets` elements beyond `index`; the places become
    the elements of a row."""
    vector = _KINDS[state.dtype]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state_, index_, offsets_, tile_, rows_, first_, flip_ = args
        columns = []
        for place in range(vector.width):
            at = builder.add(index_, _element(context, builder, offsets, offsets_, place))
            halves = [
                builder.load(address(context, builder, state, state_, plus(builder, at, shift)), align=alignment(state))
                for shift in (0, vector.width)
            ]
            columns.append([builder.shuffle_vector(*halves, _picks(each)) for each in _apart(vector.width)])
        parts = [_transposed(builder, [column[part] for column in columns]) for part in range(2)]
        for number in range(vector.width):
            row = _element(context, builder, rows, rows_, plus(builder, first_, number))
            start = builder.mul(builder.xor(row, flip_), row.type(2 * vector.width))
            for part in range(2):
                at = plus(builder, start, part * vector.width)
                builder.store(parts[part][number], address(context, builder, tile, tile_, at), align=alignment(tile))
        return context.get_dummy_value()

    return types.void(state, types.intp, offsets, tile, rows, types.intp, types.intp), generate


@intrinsic
def scatter_block(
    typing: Any, state: Any, index: Any, offsets: Any, tile: Any, rows: Any, first: Any, flip: Any, scale: Any
) -> Any:
    """What gather_block does, undone: the same rows of the tile, times a scale, back to the state."""
    vector = _KINDS[state.dtype]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state_, index_, offsets_, tile_, rows_, first_, flip_, scale_ = args
        parts: list[list[Any]] = [[], []]
        for number in range(vector.width):
            row = _element(context, builder, rows, rows_, plus(builder, first_, number))
            start = builder.mul(builder.xor(row, flip_), row.type(2 * vector.width))
            for part in range(2):
                at = plus(builder, start, part * vector.width)
                value = builder.load(address(context, builder, tile, tile_, at), align=alignment(tile))
                parts[part].append(builder.fmul(value, scale_))
        columns = [_transposed(builder, each) for each in parts]
        for place in range(vector.width):
            at = builder.add(index_, _element(context, builder, offsets, offsets_, place))
            for half, picks in enumerate(_together(vector.width)):
                value = builder.shuffle_vector(columns[0][place], columns[1][place], _picks(picks))
                where = plus(builder, at, half * vector.width)
                builder.store(value, address(context, builder, state, state_, where), align=alignment(state))
        return context.get_dummy_value()

    return types.void(state, types.intp, offsets, tile, rows, types.intp, types.intp, vector), generate


def plus(builder: Any, index: Any, number: int) -> Any:
    return builder.add(index, index.type(number))


def _element(context: Any, builder: Any, kind: types.Array, array: Any, index: Any) -> Any:
    """An element of an integer array, as intp."""
    data = context.make_array(kind)(context, builder, array).data
    number = ir.IntType(64)(index) if isinstance(index, int) else index
    value = builder.load(builder.gep(data, [number]))
    return value if value.type.width == 64 else builder.sext(value, ir.IntType(64))


def _apart(width: int) -> tuple[Sequence[int], Sequence[int]]:
    return range(0, 2 * width, 2), range(1, 2 * width, 2)


def _together(width: int) -> tuple[Sequence[int], Sequence[int]]:
    order = [i // 2 + width * (i % 2) for i in range(2 * width)]
    return order[:width], order[width:]


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Swap the off-diagonal blocks of half the size, a quarter, ..."""
    size = len(rows)
    half = size // 2
    while half:
        low = _picks([j if not j & half else size + j - half for j in range(size)])
        high = _picks([j + half if not j & half else size + j for j in range(size)])
        after = list(rows)
        for i in range(size):
            if not i & half:
                after[i] = builder.shuffle_vector(rows[i], rows[i + half], low)
                after[i + half] = builder.shuffle_vector(rows[i], rows[i + half], high)
        rows = after
        half //= 2
    return rows


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of element `index`, to be read soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.PointerType(ir.IntType(8))
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = builder.bitcast(address(context, builder, array, args[0], args[1]), byte)
        builder.call(function, [place, flag(0), flag(2), flag(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def fetch_add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to element `index` of an int64 array that threads share; the value it had."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


@intrinsic
def fetch(typing: Any, array: Any, index: Any) -> Any:
    """Element `index` of an int64 array that threads or processes share; what was written before it is seen as well."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "acquire", 8)

    return types.int64(array, types.intp), generate


@intrinsic
def give_way(typing: Any) -> Any:
    """Let another thread run."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def parity(typing: Any, mask: Any) -> Any:
    """1 for an integer with an odd number of set bits, else 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(builder.ctpop(args[0]), args[0].type(1))

    return types.int64(types.int64), generate
