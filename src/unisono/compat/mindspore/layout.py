"""From strategies to a mesh: the axes that ranks must be arranged in so that every `.shard(...)` of a net can hold.

    MatMul().shard(((2, 4), (4, 1))) on 8 ranks      Mesh((2, 4)): ranks 0 to 3 have the first half of the rows

MindSpore gives each op a device matrix of its own. Here a program has one mesh for all, and a strategy's number is an
axis, or several that multiply to it; of all meshes that every strategy can be written on, the one with the fewest axes
is taken, and of those the one that keeps the order of the strategies' dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from unisono.compat.language import say
from unisono.compat.mindspore.ops.primitive import Primitive
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh

MOST_AXES = 4
Counts = tuple[int, ...]


def mesh_for(marked: Sequence[Primitive], ranks: int, search: str) -> Mesh:
    """The mesh on which the strategies of a net's ops are written. Without any: all ranks along the batch, and for a
    search that chooses by itself (recursive, dynamic), axes of the smallest sizes, so that it has most to choose from.
    """
    if not marked or ranks == 1:
        if search == "propagate" or ranks == 1:
            return _mesh((ranks,), ("dp",), ranks)
        shape = _prime_axes(ranks)
        return _mesh(shape, tuple(f"axis{number}" for number in range(len(shape))), ranks)
    for each in marked:
        _require_shards(each, ranks)
    tensors = [counts for each in marked for counts in each.in_strategy or ()]
    fitting = []
    for shape in _shapes(ranks):
        turned = [_turned(counts, shape) for counts in tensors]
        if None not in turned:
            fitting.append((len(shape), sum(filter(None, turned)), shape))
    if not fitting:
        listed = "; ".join(f"{each.shown}.shard({each.in_strategy}) at {each.line}" for each in marked)
        raise UsageError(
            say(
                f"no mesh of {ranks} ranks, with up to {MOST_AXES} axes, has all of these strategies: {listed}"
                "; MindSpore would give each op a device matrix of its own and move tensors between them: "
                "use numbers of shards with common factors",
                f"{ranks} 个进程、至多 {MOST_AXES} 个轴的网格无法满足所有这些策略：{listed}；MindSpore 会为每"
                "个算子建立各自的设备矩阵并在其间搬移张量：请使用有公因数的切分数",
            )
        )
    shape = min(fitting)[2]
    used = {axis for counts in tensors for axis in _axes_of(counts, shape)}
    idle = [axis for axis in range(len(shape)) if axis not in used]
    batch = idle[0] if idle else 0
    names = ["dp" if axis == batch else f"mp{axis}" for axis in range(len(shape))]
    return _mesh(shape, tuple("mp" if len(shape) == 2 and name != "dp" else name for name in names), ranks)


def _mesh(shape: Counts, names: tuple[str, ...], ranks: int) -> Mesh:
    assert math.prod(shape) == ranks
    return Mesh(shape, names)


def _require_shards(op: Primitive, ranks: int) -> None:
    assert op.in_strategy is not None
    for number, counts in enumerate(op.in_strategy):
        shards = math.prod(counts)
        if ranks % shards:
            divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            where = f"{op.shown}.shard({op.in_strategy}) at {op.line}"
            raise UsageError(
                say(
                    f"{where} makes {shards} shards of input {number}, but {ranks} ranks are running; MindSpore "
                    "refuses a strategy whose shards do not divide its devices when it compiles the net: start "
                    f"{shards} ranks (unisono run -n {shards}), or use numbers that multiply to one of {divisors}",
                    f"{where} 把输入 {number} 切成 {shards} 份，但只启动了 {ranks} 个进程；份数不能整除设备数时，"
                    f"MindSpore 编译网络会报错：请启动 {shards} 个进程（unisono run -n {shards}），"
                    f"或使用乘积为 {divisors} 之一的策略",
                )
            )


def _prime_axes(ranks: int) -> Counts:
    """(2, 2, 2) of 8; beyond three factors the rest is one axis."""
    factors: list[int] = []
    rest, factor = ranks, 2
    while rest > 1:
        if rest % factor:
            factor += 1
        else:
            factors.append(factor)
            rest //= factor
    return (*factors[:2], math.prod(factors[2:])) if len(factors) > 2 else tuple(factors)


def _shapes(ranks: int, axes: int = MOST_AXES) -> Iterator[Counts]:
    """All meshes of that many ranks, with axes of two ranks at least."""
    yield (ranks,)
    if axes > 1:
        for size in range(2, ranks // 2 + 1):
            if ranks % size == 0:
                yield from ((size, *rest) for rest in _shapes(ranks // size, axes - 1))


def _ways(counts: Counts, shape: Counts) -> Iterator[tuple[int | None, ...]]:
    """For each axis the dim that it shards, so that the dims have these numbers of shards."""
    for dims in itertools.product([None, *range(len(counts))], repeat=len(shape)):
        made = [1] * len(counts)
        for dim, size in zip(dims, shape, strict=True):
            if dim is not None:
                made[dim] *= size
        if tuple(made) == counts:
            yield dims


def _turned(counts: Counts, shape: Counts) -> int | None:
    """How many pairs of axes shard dims against their order, at least; None where the mesh has no such shards."""
    return min((_inversions(dims) for dims in _ways(counts, shape)), default=None)


def _axes_of(counts: Counts, shape: Counts) -> set[int]:
    best = min(_ways(counts, shape), key=_inversions)
    return {axis for axis, dim in enumerate(best) if dim is not None}


def _inversions(dims: Sequence[int | None]) -> int:
    used = [dim for dim in dims if dim is not None]
    return sum(before > after for before, after in itertools.combinations(used, 2))
