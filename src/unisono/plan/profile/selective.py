"""What recompute=selective keeps: of the values that autograd saves, those that are cheap to compute again are dropped.

    kept      results of products (matmuls, convolutions), attention, collectives, reductions and random numbers
    dropped   results of elementwise ops, casts, copies, concatenations and norms, where dropping one frees enough
              memory for the bytes that computing it again moves, and for what must be kept instead

A dropped value is computed from values that are kept: saved ones, or the inputs of an op that widens. So a norm in
float32 of a bfloat16 residual stream keeps the stream and drops its float32 copy. Random numbers and collectives are
never repeated.

The same cast of the same value, which autocast makes for each of the layers that share an input, is kept once.

`choose` is the policy. It runs twice: on a block's real tensors (parallel/recomputation/selective.py), and on those of
a trace, for the memory and time of plans (from_trace.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from unisono.torch_compat import OpOverload

# Bytes that must be freed for each byte that is read or written to compute a value again. An elementwise op of one
# input moves two bytes for each of its result's, one of two inputs three. A float32 RMSNorm of bfloat16 values, written
# as single ops, would move seven to have its normalised values in bfloat16 again: these are kept.
WORTH = 0.25
# Cheap ops that torch does not tag as pointwise; those of traces, which have composite ops, too.
_COPIES = ("_to_copy", "to", "type_as", "clone", "contiguous", "reshape", "flatten", "cat", "stack")
_NORMS = ("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm", "group_norm")
_CHEAP = frozenset(f"aten.{name}" for name in (*_COPIES, *_NORMS))


class Value:
    """A tensor's memory: what made it, and what becomes of it."""

    __slots__ = (
        "inputs",
        "is_changed",
        "is_dropped",
        "is_recomputable",
        "is_saved",
        "is_source",
        "moved",
        "nbytes",
        "repeats",
    )

    def __init__(
        self, nbytes: int, inputs: Sequence[Value] | None = None, moved: int = 0, *, repeats: Value | None = None
    ) -> None:
        """inputs: of the cheap op that made it; None where another op did. moved: bytes which that op moves. repeats:
        the earlier value that is the same."""
        self.nbytes = nbytes
        self.inputs = (inputs or ()) if repeats is None else (repeats,)
        self.is_recomputable = inputs is not None
        self.moved = moved if repeats is None else 0
        self.repeats = repeats
        self.is_saved = False  # by autograd
        self.is_changed = False  # in place, since it was made
        self.is_dropped = False
        self.is_source = False  # kept because something dropped is computed from it

    @property
    def is_kept(self) -> bool:
        return self.is_source or (self.is_saved and not self.is_dropped)


def choose(values: Iterable[Value]) -> None:
    """Set `is_dropped` and `is_source` of values, which are given in the order in which they were computed."""
    for value in values:
        if not value.is_saved or not value.is_recomputable or value.is_changed:
            continue
        found = _sources(value)
        if found is None:
            continue
        sources, moved = found
        more = sum(source.nbytes for source in sources if not source.is_kept)
        if value.nbytes - more >= WORTH * moved:
            value.is_dropped = True
            for source in sources:
                source.is_source = True


def _sources(value: Value) -> tuple[set[Value], int] | None:
    """The values from which one would be computed again, and the bytes that this moves, beyond what other dropped
    values do; None where one of them has been changed in place."""
    sources: set[Value] = set()
    visited = {value}
    pending = [value]
    moved = 0
    while pending:
        made = pending.pop()
        moved += made.moved
        for given in made.inputs:
            if given.is_changed:
                return None
            if given.is_dropped or given in visited:
                continue
            if given.is_kept or not given.is_recomputable or given.nbytes < made.nbytes:
                sources.add(given)
            else:
                visited.add(given)
                pending.append(given)
    return sources, moved


def recomputed_with(value: Value) -> set[Value]:
    """A dropped value, and all that is computed again on the way from what is kept to it."""
    found = {value}
    pending = [value]
    while pending:
        for given in pending.pop().inputs:
            if not given.is_kept and given.is_recomputable and given not in found:
                found.add(given)
                pending.append(given)
    return found


def is_cast(op: Any) -> bool:
    """Whether an op gives the values of its input another dtype, in an eager run or in a trace."""
    return op in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)


@cache
def is_cheap(op: Any) -> bool:
    """Whether an op of torch's dispatcher is deterministic, changes nothing in place, and is bound by memory."""
    if not isinstance(op, OpOverload) or op._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return torch.Tag.pointwise in op.tags or str(op._overloadpacket) in _CHEAP
