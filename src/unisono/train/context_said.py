"""What ranks along cp say inside of attention: the hops of a ring, or Ulysses' two exchanges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from unisono.errors import UsageError
from unisono.graph.beside import Inside
from unisono.graph.lowering import Compute, Lowered
from unisono.graph.rules.registry import target_name
from unisono.graph.talk import Shape, Talk
from unisono.parallel.ulysses import Deal
from unisono.plan.plan import Plan
from unisono.train.context_cuts import AXIS, CORE

_ORDERS = {
    "ring": "ring attention; a rank has two runs of each sequence, an early and a late one",
    "ulysses": "Ulysses attention; a rank has a run of each sequence, and some heads of all of it in attention",
}


def show_context(parts: Sequence[Lowered], plan: Plan, heads: Sequence[int], rank: int) -> None:
    """Write into the programs of a rank's stages what is said in their attentions. heads: of each one's keys, in the
    whole model; none where nobody knows more than the trace."""
    cores = [op.name for op in parts[0].trace.ops if target_name(op.target).startswith(CORE)]
    known = dict(zip(cores, heads, strict=True)) if len(heads) == len(cores) else {}
    for part in parts:
        part.beside.about.append(f"cp: {_ORDERS[plan.context]}")
        for compute in part.computes:
            if compute.name in cores:
                part.beside.inside[compute.name] = _Attention(compute, part, known, rank).said(plan.context)


class _Attention:
    """One op's, as a rank does it: queries, keys and values of its tokens, (..., heads, tokens, width)."""

    def __init__(self, compute: Compute, part: Lowered, known: Mapping[str, int], rank: int) -> None:
        queries, keys, values = (part.values[name] for name in compute.inputs[:3])
        heads = known.get(compute.name, keys.shape[-3])
        self._shapes = [queries.local(part.mesh, rank)]
        for each in (keys, values):
            self._shapes.append(_repeated_less(each.local(part.mesh, rank), each.shape[-3], heads, compute.name))
        self._itemsize = part.values[compute.inputs[0]].dtype.itemsize
        self._ranks = part.mesh.along(AXIS, rank=rank)
        self._place = self._ranks.index(rank)
        self._has_backward = compute.name in part.trace.tracked

    def said(self, kind: str) -> Inside:
        forward, backward = self._ring() if kind == "ring" else self._ulysses()
        return Inside(f"{kind} over {AXIS}", forward, backward if self._has_backward else ())

    def _ring(self) -> tuple[tuple[Talk, ...], tuple[Talk, ...]]:
        """Keys and values go round, and in the backward once more, followed by their gradients."""
        elements = sum(math.prod(shape) for shape in self._shapes[1:])
        round_trip = tuple(self._hops(elements, "keys and values"))
        return round_trip, (*round_trip, *self._hops(elements, "gradients of keys and values"))

    def _hops(self, elements: int, what: str) -> Iterator[Talk]:
        count = len(self._ranks)
        right, left = self._ranks[(self._place + 1) % count], self._ranks[self._place - 1]
        shape = (elements,)
        for hop in range(1, count):
            which = f"{what}, hop {hop} of {count - 1}"
            yield Talk("send", (AXIS,), (right,), 0, shape, shape, which, True)
            yield Talk("recv", (AXIS,), (left,), elements * self._itemsize, shape, shape, which, True)

    def _ulysses(self) -> tuple[tuple[Talk, ...], tuple[Talk, ...]]:
        """Tokens for heads, and back; the backward goes the same ways, the other way round."""
        count = len(self._ranks)
        queries, keys, values = (_in_four(shape) for shape in self._shapes)
        deal = Deal(queries[1], keys[1], count)
        heads = (deal.queries, deal.keys, deal.keys)
        both = list(zip((queries, keys, values), heads, strict=True))
        leaving = [sum(_with(shape, len(held[r])) for shape, held in both) for r in range(count)]
        coming = [sum(_with(shape, len(held[self._place])) for shape, held in both)] * count
        made = (*queries[:3], values[3])
        out = [_with(made, len(deal.queries[self._place]))] * count
        home = [_with(made, len(deal.queries[r])) for r in range(count)]
        forward = (
            self._exchange(leaving, coming, "queries, keys and values: heads for tokens"),
            self._exchange(out, home, "the outcome: tokens for heads"),
        )
        backward = (
            self._exchange(home, out, "the outcome's gradient: heads for tokens"),
            self._exchange(coming, leaving, "gradients of queries, keys and values: tokens for heads"),
        )
        return forward, backward

    def _exchange(self, leaving: Sequence[int], coming: Sequence[int], what: str) -> Talk:
        received = (sum(coming) - coming[self._place]) * self._itemsize
        return Talk("all_to_all", (AXIS,), self._ranks, received, (sum(leaving),), (sum(coming),), what, True)


def _repeated_less(local: Shape, traced: int, heads: int, name: str) -> Shape:
    """A rank's piece, when the whole has other heads than were traced."""
    mine, rest = divmod(local[-3] * heads, traced)
    if rest or not mine:
        raise UsageError(
            f"cp: {name} repeats {heads} heads of keys to {traced} when it is traced, and what ranks with {local[-3]} "
            "of these send cannot be shown; use --plan with a smaller tp"
        )
    return (*local[:-3], mine, *local[-2:])


def _in_four(shape: Shape) -> Shape:
    return shape if len(shape) == 4 else (1, *shape)


def _with(shape: Shape, heads: int) -> int:
    """Elements, when there are so many heads."""
    return shape[0] * heads * shape[2] * shape[3]
