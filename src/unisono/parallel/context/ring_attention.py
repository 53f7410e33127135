"""Ring attention: every rank keeps its queries, and the keys and values go round.

    step 0      rank r attends with its own keys and values, which already travel on to rank r+1
    step j      ... with those of rank r-j, merging each outcome with the ones before (see partial_attention)

so no rank ever holds more than two ranks' keys, and a step's transfer hides behind the step's work. In the backward
keys and values go round again; one step behind them goes the sum of what other ranks add to their gradients, and its
last hop brings it home. A rank sends 2*b*s*h*(P-1)/P elements in the forward: its share of K and V, P-1 times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.errors import UsageError
from unisono.mesh.autograd_collectives import first_order_only
from unisono.parallel.context.partial_attention import (
    AttentionRules,
    MergedAttention,
    attend,
    attend_backward,
    covers,
    merging_dtype,
)
from unisono.parallel.context.tokens import Tokens, require_fit

# The factors of the weights of some queries to some keys, given by their global positions: 0 or 1/(1-p).
Noise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    comm: Communicator,
    causal: bool = False,
    scale: float | None = None,
    tokens: Tokens | None = None,
    mask: torch.Tensor | None = None,
    noise: Noise | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks: (batch, heads, tokens, width), with gradients.

    `tokens` gives which positions each rank holds; by default the zigzag of a sequence that is as long on every rank.
    k and v may have fewer heads than q. `mask` is of global positions, (..., sequence, sequence) or broadcasting to
    it, the same on all ranks: True where a query may look, or numbers to add to the scores.
    `noise` is for dropout; the backward asks for the same factors again.
    """
    tokens = tokens or Tokens.zigzag(q.shape[2] * comm.size, comm.size)
    require_fit("ring", q, k, v, tokens, comm.rank, comm.size)
    if mask is not None and causal:
        raise UsageError("ring attention was given a mask and causal; put both into the mask")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    round_trip = _Round(comm, tokens, AttentionRules(scale, causal), _bias(mask, q), noise)
    return _RingAttention.apply(q, k, v, round_trip)


def _bias(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """A mask as numbers to add."""
    if mask is None:
        return None
    if mask.requires_grad:
        raise UsageError("ring attention with a mask that needs a gradient; use context=ulysses for learned biases")
    dtype = merging_dtype(q.dtype)
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    return mask.to(dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: _Round) -> torch.Tensor:
        full = MergedAttention(q, v.shape[-1])
        with _without_autocast(q):
            for source, (keys, values) in ring.visits(k, v):
                for rows, columns, rules in ring.parts(source):
                    part = attend(q[:, :, rows], keys[:, :, columns], values[:, :, columns], rules)
                    full.merge(rows, *part)
        out = full.out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, full.lse)
        return out

    @staticmethod
    @first_order_only("ring attention", "use context=ulysses, or a plan without cp")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Round = ctx.ring
        dq = _Sum(q)
        gradients = _RingGradients(ring)
        with _without_autocast(q):
            for source, (keys, values) in ring.visits(k, v):
                dk, dv = _Sum(keys), _Sum(values)
                for rows, columns, rules in ring.parts(source):
                    part = (keys[:, :, columns], values[:, :, columns], out[:, :, rows], lse[:, :, rows])
                    shares = attend_backward(grad[:, :, rows], q[:, :, rows], *part, rules)
                    for total, index, share in zip((dq, dk, dv), (rows, columns, columns), shares, strict=True):
                        total.add(index, share)
                gradients.add(source, _Pair.of(dk.total, dv.total))
        returned = gradients.returned()
        return dq.total.to(q.dtype), returned.keys.to(k.dtype), returned.values.to(v.dtype), None


class _Sum:
    """Shares of a gradient, each of some tokens of `x`."""

    def __init__(self, x: torch.Tensor) -> None:
        self._of = x
        self._total: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        if self._total is None:
            self._total = torch.zeros_like(self._of, dtype=merging_dtype(self._of.dtype))
        return self._total

    def add(self, tokens: slice, share: torch.Tensor) -> None:
        """The share is not used afterwards."""
        if self._total is None and covers(tokens, self._of):
            self._total = share.to(merging_dtype(self._of.dtype))
        else:
            self.total[:, :, tokens] += share


@dataclass(frozen=True)
class _Pair:
    """Keys and values in one buffer, so that they travel as one message."""

    flat: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def on(cls, flat: torch.Tensor, keys: torch.Size | tuple[int, ...], values: torch.Size | tuple[int, ...]) -> _Pair:
        boundary = math.prod(keys)
        return cls(flat, flat[:boundary].view(keys), flat[boundary:].view(values))

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> _Pair:
        return cls.on(torch.cat([keys.reshape(-1), values.reshape(-1)]), keys.shape, values.shape)

    def of_length(self, tokens: int) -> _Pair:
        """Room for a pair that differs in the count of tokens only."""
        shapes = [(*x.shape[:2], tokens, x.shape[3]) for x in (self.keys, self.values)]
        return _Pair.on(self.flat.new_empty(sum(map(math.prod, shapes))), *shapes)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.keys, self.values))


@dataclass(frozen=True)
class _Round:
    """One trip round the ring, seen from this rank."""

    comm: Communicator
    tokens: Tokens
    rules: AttentionRules
    bias: torch.Tensor | None  # of global positions
    noise: Noise | None

    def visits(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, _Pair]]:
        """Every rank's keys and values, the own ones first; the next ones are under way while these are used."""
        size, rank = self.comm.size, self.comm.rank
        pair = _Pair.of(k, v)
        for step in range(size):
            source = (rank - step) % size
            if step == size - 1:
                yield source, pair
                return
            coming, arrival = self.pass_on(pair, self.tokens.count((source - 1) % size))
            yield source, pair
            arrival.wait()
            pair = coming

    def pass_on(self, pair: _Pair, length: int) -> tuple[_Pair, Handle]:
        """Begin to send a pair to the right and to receive one of that length from the left."""
        size, rank = self.comm.size, self.comm.rank
        coming = pair.of_length(length)
        handle = self.comm.exchange(
            sends=[(pair.flat, (rank + 1) % size)] if pair.flat.numel() else [],
            recvs=[(coming.flat, (rank - 1) % size)] if coming.flat.numel() else [],
            async_op=True,
        )
        return coming, handle

    def parts(self, source: int) -> list[tuple[slice, slice, AttentionRules]]:
        """Which of this rank's queries look at which of the source's keys, and under which rules."""
        rank = self.comm.rank
        causal = self.rules.causal
        if source == rank and causal:
            mine = slice(0, self.tokens.count(rank))
            return [(mine, mine, self._rules(source, mine, mine))] if mine.stop else []
        plain = replace(self, rules=replace(self.rules, causal=False))
        return [
            (rows, columns, plain._rules(source, rows, columns))
            for rows, columns in self.tokens.seen(source, rank, causal)
            if rows.stop > rows.start and columns.stop > columns.start
        ]

    def _rules(self, source: int, rows: slice, columns: slice) -> AttentionRules:
        queries = self.tokens.positions(self.comm.rank)[rows]
        keys = self.tokens.positions(source)[columns]
        rules = self.rules
        if self.bias is not None:
            bias = _taken(self.bias, -1, keys)
            rules = replace(rules, bias=lambda chunk: _taken(bias, -2, queries[chunk]))
        if self.noise is not None:
            noise = self.noise
            rules = replace(rules, noise=lambda chunk: noise(queries[chunk], keys))
        return rules


def _taken(mask: torch.Tensor, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """These positions of a mask, along a dim that may be 1 long or absent: the same for all."""
    if mask.dim() < -dim or mask.shape[dim] == 1:
        return mask
    return mask.index_select(dim, positions.to(mask.device, non_blocking=True))


class _RingGradients:
    """Sums the gradients of keys and values as they go round with them; a rank's share for its own stays there."""

    def __init__(self, ring: _Round) -> None:
        self._ring = ring
        self._own: _Pair | None = None
        self._coming: tuple[_Pair, Handle] | None = None
        self._sent: _Pair | None = None

    def add(self, source: int, added: _Pair) -> None:
        """Add this rank's share for the source's keys to what the ranks before have added, and pass it on."""
        comm = self._ring.comm
        if source == comm.rank:
            self._own = added
            return
        if self._coming is not None:
            before, arrival = self._coming
            arrival.wait()
            added.flat.add_(before.flat)
        self._sent = added  # alive until it has been sent
        self._coming = self._ring.pass_on(added, self._ring.tokens.count((source - 1) % comm.size))

    def returned(self) -> _Pair:
        """The gradients of this rank's own keys and values, complete."""
        assert self._own is not None
        if self._coming is not None:
            others, arrival = self._coming
            arrival.wait()
            self._own.flat.add_(others.flat)
        return self._own


def _without_autocast(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)
